"""What the cluster offers to replicas, and how its cores are divided among them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """`node_cpus`: CPU cores of each node; a replica never spans two. `has_gpu`: there is a GPU at all."""

    has_gpu: bool = False
    node_cpus: tuple[float, ...] = (1.0,)

    def cpu_share(self, num_replicas: int) -> float:
        """The most cores that each of `num_replicas` can have with all of them placed at once: a whole number, or
        hundredths below 1, as Ray takes them."""
        in_hundredths = [round(cpus * 100) for cpus in self.node_cpus]
        for share in [100 * whole for whole in range(max(in_hundredths) // 100, 1, -1)] + list(range(100, 0, -1)):
            if sum(cpus // share for cpus in in_hundredths) >= num_replicas:
                return share / 100
        return 0.01
