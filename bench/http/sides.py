"""Who is measured: the engine alone, driven in its own process, and the same model behind HTTP. Same prompts, same
numbers of tokens; one works while the other waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.engine_speed.rows import Row
from bench.engine_speed.sides import ordered
from bench.fit.engine import MeasuredEngine, Played
from bench.http.answer import StreamTimes
from bench.peers.driver import Driver, DriverFailed, cpu_seconds
from replica.scheduler.plan import PENDING_TOKEN

Prompts = Sequence[Sequence[int]]
CLIENT = "client"
"""Kind of process: the load client."""
RUN_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """One row on one side, once. `seconds`: from the first request's sending to the last token's coming.
    `cpu_seconds`: what each kind of process used meanwhile."""

    seconds: float
    streams: list[StreamTimes]
    cpu_seconds: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)


class Side(Protocol):
    """Somebody idle who answers a row's requests."""

    @property
    def name(self) -> str: ...

    def run(self, row: Row, prompts: Prompts) -> Run:
        """All prompts at once, each making exactly the row's tokens. Raises `DriverFailed` when they don't."""
        ...

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time that its processes have used so far, by kind."""
        ...


class EngineSide:
    """The engine's process under our hands. A token counts when its step has ended, before anybody hears of it."""

    name = "engine"

    def __init__(self, engine: MeasuredEngine, pid: int) -> None:
        self._engine = engine
        self._pid = pid
        self._num_runs = 0

    def run(self, row: Row, prompts: Prompts) -> Run:
        self._num_runs += 1
        names, order = ordered(row, prompts, self._num_runs)
        before = self.cpu_seconds()
        played = self._engine.play([order], lambda _: None)
        streams = token_times(played)
        seconds = max(stream.events_s[-1] for stream in streams.values())
        return checked(row, Run(seconds, [streams[name] for name in names], used(before, self.cpu_seconds())))

    def cpu_seconds(self) -> dict[str, float]:
        return {"engine": cpu_seconds(self._pid)}


def token_times(played: Played) -> dict[str, StreamTimes]:
    """Every request's tokens, one event each."""
    times: dict[str, list[float]] = {}
    for update in played.updates:
        for name, token in zip(update.request_ids, update.token_ids, strict=True):
            if token != PENDING_TOKEN:
                times.setdefault(name, []).append(update.made_at_s - played.started_s)
    return {name: StreamTimes(at_s, len(at_s)) for name, at_s in times.items()}


class HttpSide:
    """A running service at `host`:`port`, asked by the load client. `processes` tells the CPU time of the service's."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        model: str,
        client: Driver,
        processes: Callable[[], Mapping[str, float]],
    ) -> None:
        self.name = name
        self._address = address
        self._model = model
        self._client = client
        self._processes = processes

    def run(self, row: Row, prompts: Prompts) -> Run:
        host, port = self._address
        bodies = [self._body(prompt, row.num_output_tokens) for prompt in prompts]
        before = self._processes()
        answer = self._client.ask(host=host, port=port, path="/v1/completions", bodies=bodies, limit_s=RUN_LIMIT_S)
        cpu = {**used(before, self._processes()), CLIENT: float(answer["cpu_seconds"])}
        streams = [StreamTimes(*stream) for stream in answer["streams"]]
        return checked(row, Run(answer["seconds"], streams, cpu))

    def cpu_seconds(self) -> dict[str, float]:
        return {**self._processes(), CLIENT: cpu_seconds(self._client.pid)}

    def _body(self, prompt: Sequence[int], num_output_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # All ways lead to one service: none may find what another one's prompts left in the prefix cache.
            "cache_salt": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def used(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {kind: seconds - before.get(kind, 0.0) for kind, seconds in now.items()}


def checked(row: Row, run: Run) -> Run:
    """Raises `DriverFailed` when somebody made another number of tokens than was asked for."""
    made = [stream.num_tokens for stream in run.streams]
    if made != [row.num_output_tokens] * row.num_seqs:
        raise DriverFailed(f"{row}: {len(made)} answers of {min(made, default=0)} to {max(made, default=0)} tokens")
    return run
