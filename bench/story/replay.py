"""One load, played on one engine, as columns: what each step held and what each request waited for.

The engine is the real one or its double in virtual time; both speak `EngineUpdate`, so both are read here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from itertools import groupby

from bench.fit.engine import MeasuredEngine, Order, Played, fixed_request
from bench.traces.trace import Trace
from replica.config import EngineConfig
from replica.engine_api import EngineUpdate
from replica.request import FinishReason
from replica.scheduler.plan import PENDING_TOKEN

OpenEngine = Callable[[EngineConfig], AbstractContextManager[MeasuredEngine]]
"""Starts an engine for a while: its model loaded, nothing running."""


@dataclass(slots=True)
class Steps:
    """Columns, one entry a step: `ended_s` on the play's clock, `seconds` it took (from the end of the step before, if
    the engine wasn't idle between), `width` = sequences that got a token, `tokens` planned, `waiting` after it,
    `blocks_held`, `preemptions` and `recomputed` tokens."""

    ended_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    width: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    waiting: array[int] = field(default_factory=lambda: array("i"))
    blocks_held: array[int] = field(default_factory=lambda: array("i"))
    preemptions: array[int] = field(default_factory=lambda: array("i"))
    recomputed: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.ended_s)


@dataclass(slots=True)
class Replay:
    """`ttft_s`: from a request's arrival to its first token, in the order of arrival. `gap_s`: every time between two
    tokens of one request (ITL). `num_blocks`: the KV pool."""

    steps: Steps
    ttft_s: array[float]
    gap_s: array[float]
    num_blocks: int

    @property
    def num_output_tokens(self) -> int:
        return sum(self.steps.width)

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return self.steps.ended_s[-1]


def as_one_play(parts: Sequence[Replay]) -> Replay:
    """Plays of fixed batches, one after the other, as if all their requests had been present from the beginning: a
    fixed batch doesn't depend on who waits behind it, so only the waiting differs."""
    whole, begun_s = Replay(Steps(), array("d"), array("d"), parts[0].num_blocks), 0.0
    num_later = sum(len(part.ttft_s) for part in parts)
    for part in parts:
        num_later -= len(part.ttft_s)
        first = len(whole.steps)
        for column in fields(Steps):
            getattr(whole.steps, column.name).extend(getattr(part.steps, column.name))
        for i in range(first, len(whole.steps)):
            whole.steps.ended_s[i] += begun_s
            whole.steps.waiting[i] += num_later
        whole.ttft_s.extend(ttft_s + begun_s for ttft_s in part.ttft_s)
        whole.gap_s.extend(part.gap_s)
        begun_s += part.seconds
    return whole


def replay(
    engine: MeasuredEngine,
    trace: Trace,
    progress: Callable[[str], None],
    label: str,
    budgets: Mapping[str, int | float] | None = None,
) -> Replay:
    """Plays the trace and reads what came back. `progress` hears `label` and how many requests have ended; `budgets`
    are set with the first requests and stay. Raises `ValueError` when a request didn't get exactly its tokens."""
    orders = _orders(trace, engine.shape.vocab_size)
    orders[0] = orders[0]._replace(budgets=tuple((budgets or {}).items()))
    played = engine.play(orders, lambda ended: progress(f"{label}: {ended}/{len(trace)}"))
    return _Reader(trace, played.started_s, engine.shape.num_blocks).read(played)


def _orders(trace: Trace, vocab_size: int) -> list[Order]:
    """Requests that arrive at the same time are one order."""
    orders = []
    for at_s, numbers in groupby(range(len(trace)), key=lambda i: trace.arrival_s[i]):
        requests = (fixed_request(str(i), trace.prompt_ids(i, vocab_size), trace.output_tokens[i]) for i in numbers)
        orders.append(Order(at_s, tuple(requests)))
    return orders


class _Reader:
    """Turns updates into columns."""

    def __init__(self, trace: Trace, started_s: float, num_blocks: int) -> None:
        self._trace = trace
        self._started_s = started_s
        self._last_token_s = array("d", [-1.0]) * len(trace)
        self._num_left = array("i", trace.output_tokens)
        self._replay = Replay(Steps(), array("d", [-1.0]) * len(trace), array("d"), num_blocks)

    def read(self, played: Played) -> Replay:
        before_s = 0.0
        for update in played.updates:
            now_s = update.made_at_s - self._started_s
            width = self._read_tokens(update, now_s)
            if update.stats.num_tokens:
                self._add_step(update, now_s, before_s, width)
            before_s = now_s
        short = [i for i, left in enumerate(self._num_left) if left]
        if short:
            raise ValueError(f"{len(short)} requests didn't get exactly their tokens, request {short[0]} for one")
        return self._replay

    def _read_tokens(self, update: EngineUpdate, now_s: float) -> int:
        """How many sequences got a token."""
        replay, last_token_s, width = self._replay, self._last_token_s, 0
        for name, token, reason in zip(update.request_ids, update.token_ids, update.finish_reasons, strict=True):
            if reason not in (None, FinishReason.LENGTH):
                raise ValueError(f"request {name} ended by {reason}: {[error for error in update.errors if error]}")
            if token == PENDING_TOKEN:
                continue
            number, width = int(name), width + 1
            before_s = last_token_s[number]
            if before_s < 0:
                replay.ttft_s[number] = now_s - self._trace.arrival_s[number]
            else:
                replay.gap_s.append(now_s - before_s)
            last_token_s[number] = now_s
            self._num_left[number] -= 1
        return width

    def _add_step(self, update: EngineUpdate, now_s: float, before_s: float, width: int) -> None:
        steps, stats = self._replay.steps, update.stats
        steps.ended_s.append(now_s)
        steps.seconds.append(stats.step_s if stats.idle_s else now_s - before_s)
        steps.width.append(width)
        steps.tokens.append(stats.num_tokens)
        steps.waiting.append(stats.num_waiting)
        steps.blocks_held.append(stats.num_blocks_held)
        steps.preemptions.append(stats.num_preemptions)
        steps.recomputed.append(stats.num_recomputed_tokens)
