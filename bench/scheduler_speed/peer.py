"""The peer's scheduler as a `Side`, driven in another interpreter (`bench/peers`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.peers.driver import Driver, driver
from bench.scheduler_speed.workload import StepTimes, Workload

_DRIVER = "bench.scheduler_speed.vllm_driver"


class PeerProcess:
    """A `Side` in another interpreter. `version` is the peer's own."""

    def __init__(self, peer: Driver) -> None:
        self._peer = peer
        self.version = peer.version

    def start(self, workload: Workload) -> None:
        self._peer.ask(start=[workload.num_running, workload.num_waiting])

    def run_round(self, num_steps: int) -> StepTimes:
        return StepTimes(*self._peer.ask(round=num_steps)["times"])


@contextmanager
def peer_process(python: str) -> Iterator[PeerProcess]:
    """Starts the driver under this interpreter. Raises `DriverFailed` when it can't run."""
    with driver("vllm", [python, "-m", _DRIVER]) as peer:
        yield PeerProcess(peer)
