"""What a simulated cluster is: replicas, routers, and how long news is under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.simulate.step_cost import H100_8B, StepCost
from replica.config import SchedulerConfig
from replica.errors import SettingError
from replica.model.api import ModelShape
from replica.scheduler.budgets import check_against_model
from router.config import RouterConfig

MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """All replicas are alike, and so are all routers; request i comes to router i modulo `num_routers`.

    `network_delay_s`: one way, from a router to a replica or back. `report_delay_s`: what a replica has to say is so
    much older, beside the network, when a router learns of it (at least 1 ms). `stream_delay_s`: the same for what its
    streams say (taken, first token, end); None: as late as reports. `num_workers`: processes that step the
    replicas (1: this one); it changes nothing in the result. `seed`: of the routers' random choices.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    shape: ModelShape = field(default_factory=lambda: ModelShape(3072, 128, 128_256, 16_384, ()))
    cost: StepCost = H100_8B
    router: RouterConfig = field(default_factory=RouterConfig)
    num_replicas: int = 1
    num_routers: int = 1
    network_delay_s: float = 0.0005
    report_delay_s: float = 0.05
    stream_delay_s: float | None = None
    seed: int = 0
    num_workers: int = 1

    def __post_init__(self) -> None:
        for name, largest in (("num_replicas", 100_000), ("num_routers", 1000), ("num_workers", MAX_WORKERS)):
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise SettingError(name, value, f"from 1 to {largest}")
        if not 0.0 <= self.network_delay_s <= 10.0:
            raise SettingError("network_delay", self.network_delay_s, "from 0 to 10 seconds")
        if not 0.001 <= self.report_delay_s <= 60.0:
            raise SettingError("report_delay", self.report_delay_s, "from 0.001 to 60 seconds")
        if self.stream_delay_s is not None and not 0.001 <= self.stream_delay_s <= self.report_delay_s:
            raise SettingError("stream_delay", self.stream_delay_s, "from 0.001 seconds to report_delay")
        for name in ("num_blocks", "block_size", "max_model_len"):
            value = getattr(self.shape, name)
            if not 1 <= value < math.inf:
                raise SettingError(name, value, "at least 1")
        check_against_model(self.scheduler, self.shape)

    @property
    def back_s(self) -> float:
        """From a replica's step to a router, for reports."""
        return self.network_delay_s + self.report_delay_s

    @property
    def streams_back_s(self) -> float:
        """The same for what streams say; never more."""
        return self.back_s if self.stream_delay_s is None else self.network_delay_s + self.stream_delay_s

    @property
    def report_every_s(self) -> float:
        """A busy replica reports at most so often: more would change little about news that is this old."""
        return self.back_s / 2
