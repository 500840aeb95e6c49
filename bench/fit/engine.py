"""An engine as the measurements see it: orders are played to it at given times, its updates come back.

The real one runs in a process of its own and is built by the command line (`bench` loads no torch); its double,
`virtual_engine.py`, runs the same engine code in virtual time with a step cost that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bench.simulate.requests import exactly
from replica.config import EngineConfig
from replica.engine_api import AddRequest, EngineCommands, EngineUpdate
from replica.model.api import ModelShape
from replica.request import GenerationRequest


class Order(NamedTuple):
    """Requests that reach the engine together, `at_s` after the play began, and budgets that change with them."""

    at_s: float
    requests: tuple[GenerationRequest, ...]
    budgets: tuple[tuple[str, int | float], ...] = ()

    def commands(self, started_s: float) -> EngineCommands:
        """For an engine whose clock showed `started_s` when the play began."""
        arrived_s = started_s + self.at_s
        return EngineCommands(
            tuple(AddRequest(request, arrived_s) for request in self.requests), (), dict(self.budgets)
        )


@dataclass(frozen=True, slots=True)
class Played:
    """What came back: `updates` in order, from the first step on; `started_s` on the clock of `made_at_s`."""

    started_s: float
    updates: list[EngineUpdate]


class MeasuredEngine(Protocol):
    """An idle engine that plays one list of orders after the other."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def is_async(self) -> bool:
        """It plans a step before the last one is committed (`replica/engine_pipeline.py`)."""
        ...

    def play(self, orders: Sequence[Order], progress: Callable[[int], None]) -> Played:
        """Plays orders, sorted by time, and waits until every request has ended; `progress` hears how many have. How
        they ended is in the updates, and whoever reads these refuses an end that it can't count.

        Raises what its engine does: the real one `ResourceError` when it dies, says nothing for minutes or fails a
        request, the double `RuntimeError` when it stands still.
        """
        ...


def fixed_request(request_id: str, prompt_ids: tuple[int, ...], num_output_tokens: int) -> GenerationRequest:
    """A greedy request that makes exactly `num_output_tokens`."""
    return GenerationRequest(request_id, prompt_ids, exactly(num_output_tokens))
