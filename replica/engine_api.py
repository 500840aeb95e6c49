"""The border between a replica's asyncio side and its engine: commands go in, updates come out, both batched.

`replica/engine.py` speaks it in-thread, `replica/engine_process.py` across a process border; whoever holds an
`EngineClient` can't tell the two apart. Everything here is plain data and pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from replica.errors import ErrorInfo
from replica.request import FinishReason, GenerationRequest, LoadReport
from replica.stats import RequestTimings, StepStats


class AddRequest(NamedTuple):
    """A request and when it reached the replica, on the machine's monotonic clock (queue time starts there)."""

    request: GenerationRequest
    arrived_at_s: float


class EndRequest(NamedTuple):
    """End a request's sequences before the model does: `sequence_index` None means all that run. `reason` is STOP when
    a stop string matched in the text, else ABORT. Unknown or already ended: nothing happens."""

    request_id: str
    sequence_index: int | None = None
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class EngineCommands:
    """One batch of orders, taken at the next step boundary: first `add`, then `end`, then `budgets`.

    `budgets`: new values of settings that may change on a running replica (`scheduler/budgets.py`), by name. `shutdown`
    ends the engine after that; what still runs is not waited for.
    """

    add: tuple[AddRequest, ...] = ()
    end: tuple[EndRequest, ...] = ()
    budgets: dict[str, Any] = field(default_factory=dict)
    shutdown: bool = False


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """What one step (or one idle second) brought, as columns: row i is news of sequence
    (`request_ids[i]`, `indexes[i]`).

    `token_ids[i]` is its new token or `PENDING_TOKEN` for none; `finish_reasons[i]` is set once, in its last row, with
    `timings[i]`, the matched stop token id in `stop_reasons[i]` and, when something went wrong, `errors[i]`.
    `num_cached_tokens[i]` is meaningful in the row of the first token. A refused request has one row, index 0,
    REJECTED, for all its sequences. `accepted` names requests taken since the last update. `stats.num_tokens` is 0
    when no step ran. `made_at_s` is when the tokens existed, monotonic clock.
    """

    made_at_s: float
    stats: StepStats
    load: LoadReport
    accepted: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    stop_reasons: list[int | None] = field(default_factory=list)
    errors: list[ErrorInfo | None] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    timings: list[RequestTimings | None] = field(default_factory=list)


class EngineClient(Protocol):
    """The asyncio side's handle on an engine, wherever it runs. All calls are made on one event loop's thread."""

    @property
    def pid(self) -> int:
        """The process in which the engine runs."""
        ...

    def listen(self, on_update: Callable[[EngineUpdate], None], on_death: Callable[[str], None]) -> None:
        """From now on call `on_update` once for each update, and `on_death` at most once, with what is known of the
        cause; after that nothing."""
        ...

    def send(self, commands: EngineCommands) -> None:
        """Hands commands over without waiting. After the engine's death it does nothing."""
        ...

    def kill(self, cause: str) -> None:
        """Ends a stalled engine at once; `on_death` follows."""
        ...

    async def close(self) -> None:
        """Ends the engine and gives everything back. Idempotent; `on_death` is not called."""
        ...
