"""Who is measured: our engine, and peers in processes of their own. All get the same prompts and make the same number
of tokens; one works while the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from bench.engine_speed.limits import ModelLoad, StepLoad
from bench.engine_speed.rows import Row
from bench.fit.engine import MeasuredEngine, Order, Played, fixed_request
from bench.fit.mirror import measured_steps
from bench.peers.driver import Driver, DriverFailed, cpu_seconds
from replica.scheduler.plan import PENDING_TOKEN

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One row on one side, once: from the first request's sending to the last token's coming.

    `outputs`: every request's tokens. Of ours alone: `first_tokens_s` (when the last of the first tokens came) and
    `steps` (what each step had to move and compute).
    """

    seconds: float
    outputs: list[list[int]]
    first_tokens_s: float | None = None
    steps: list[StepLoad] = field(default_factory=list)


class Side(Protocol):
    """An idle engine."""

    @property
    def name(self) -> str: ...

    def run(self, row: Row, prompts: Prompts) -> Run:
        """All prompts at once, each making exactly the row's tokens."""
        ...

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        ...


class OwnSide:
    """Our engine. `pid` is its process, `model` what its model costs (None: steps aren't followed)."""

    name = "brimful"

    def __init__(self, engine: MeasuredEngine, pid: int, model: ModelLoad | None) -> None:
        self._engine = engine
        self._pid = pid
        self._model = model
        self._num_runs = 0

    def run(self, row: Row, prompts: Prompts) -> Run:
        self._num_runs += 1
        names, order = ordered(row, prompts, self._num_runs)
        orders = [order]
        began_s = monotonic()
        played = self._engine.play(orders, lambda _: None)
        seconds = monotonic() - began_s
        outputs = tokens_of(played)
        steps = []
        if self._model is not None:
            steps = [self._model.of_step(step.plan) for step in measured_steps(self._engine, orders, played)]
        return checked(row, Run(seconds, [outputs.get(name, []) for name in names], _first_tokens_s(played), steps))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._pid)


def ordered(row: Row, prompts: Prompts, run: int) -> tuple[list[str], Order]:
    """A run of a row as one order at the beginning: its requests' names, in the order of the prompts, and the order."""
    names = [f"{run}-{number}" for number in range(len(prompts))]
    requests = tuple(
        fixed_request(name, tuple(prompt), row.num_output_tokens) for name, prompt in zip(names, prompts, strict=True)
    )
    return names, Order(0.0, requests)


def tokens_of(played: Played) -> dict[str, list[int]]:
    """Every request's tokens, by its id."""
    found: dict[str, list[int]] = {}
    for update in played.updates:
        for name, token in zip(update.request_ids, update.token_ids, strict=True):
            if token != PENDING_TOKEN:
                found.setdefault(name, []).append(token)
    return found


def _first_tokens_s(played: Played) -> float:
    """When everybody had a first token, seconds after the beginning."""
    seen: set[str] = set()
    last_s = 0.0
    for update in played.updates:
        for name, token in zip(update.request_ids, update.token_ids, strict=True):
            if token != PENDING_TOKEN and name not in seen:
                seen.add(name)
                last_s = update.made_at_s - played.started_s
    return last_s


class PeerSide:
    """Who is behind a driver that takes prompts and gives seconds and outputs."""

    def __init__(self, name: str, peer: Driver) -> None:
        self.name = name
        self.version = peer.version
        self._peer = peer

    def run(self, row: Row, prompts: Prompts) -> Run:
        answer = self._peer.ask(prompts=prompts, num_output_tokens=row.num_output_tokens)
        return checked(row, Run(answer["seconds"], answer["outputs"]))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._peer.pid)


def checked(row: Row, run: Run) -> Run:
    """Raises `DriverFailed` when somebody made another number of tokens than was asked for."""
    lengths = [len(output) for output in run.outputs]
    if lengths != [row.num_output_tokens] * row.num_seqs:
        raise DriverFailed(
            f"{row}: {len(lengths)} outputs of {min(lengths, default=0)} to {max(lengths, default=0)} tokens"
        )
    return run
