"""A replica around the fake model: a model folder whose tokens are printable characters, settings, an engine driver,
and runner factories that cross into a child process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replica.config import EngineConfig, SchedulerConfig
from replica.engine import Engine, sequence_seed
from replica.engine_api import EngineUpdate
from replica.errors import ErrorInfo
from replica.model.api import ModelRunner, ModelShape
from replica.model.fake import FakeModel
from replica.model_card import TOKENIZER_FILE, ModelCard
from replica.request import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from replica.scheduler.plan import PENDING_TOKEN
from replica.service import ReplicaService
from tests.replica_reader import read

CHARACTERS = "".join(map(chr, range(33, 127)))
"""Token i is character i; the last token is EOS."""
EOS_ID = len(CHARACTERS)
VOCAB_SIZE = EOS_ID + 1


def fake_shape(num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128) -> ModelShape:
    return ModelShape(num_blocks, block_size, VOCAB_SIZE, max_model_len, (EOS_ID,))


def small_config(**changes: Any) -> EngineConfig:
    """Four places, 16 tokens a step; `changes` are fields of either settings class."""
    scheduler: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    names = SchedulerConfig.__dataclass_fields__
    scheduler |= {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    return EngineConfig(scheduler=SchedulerConfig(**scheduler), **{"check_invariants": True, **rest})


def request_of(
    request_id: str = "r", num_prompt: int = 5, max_tokens: int = 8, *, first: int = 0, **changes: Any
) -> GenerationRequest:
    """Greedy, ignoring EOS, prompt of consecutive tokens from `first`; `changes` are fields of either class."""
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    names = SamplingParams.__dataclass_fields__
    sampling |= {name: value for name, value in changes.items() if name in names}
    rest: dict[str, Any] = {"prompt_ids": tuple((first + i) % EOS_ID for i in range(num_prompt))}
    rest |= {name: value for name, value in changes.items() if name not in names}
    return GenerationRequest(request_id=request_id, sampling=SamplingParams(**sampling), **rest)


def text_of(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in token_ids if token != EOS_ID)


def write_model(folder: Path, *, eos_is_special: bool = True) -> ModelCard:
    """A prepared model folder without weights."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": EOS_ID,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": eos_is_special,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {**{char: i for i, char in enumerate(CHARACTERS)}, "<eos>": EOS_ID},
            "merges": [],
        },
    }
    card = ModelCard("fake", None, "fake", str(folder), str(folder), "fake", 128, VOCAB_SIZE, (EOS_ID,), None, {})
    card.save(folder)
    (folder / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
    return card


@dataclass(frozen=True)
class FakeFactory:
    """A `RunnerFactory` by value: pickles into the engine's process."""

    folder: Path
    shape: ModelShape = field(default_factory=fake_shape)
    faults: dict[str, Any] = field(default_factory=dict)

    def __call__(self, config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
        progress("loading the fake model")
        return FakeModel(self.shape, **self.faults), write_model(self.folder)


class FakeClock:
    """Moves only when told to, and by a millisecond with each reading."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class EngineDriver:
    """Steps an engine and keeps what it said, by (request id, index)."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.clock = FakeClock()
        self.engine = Engine(
            config, runner, clock=self.clock, random_seed=lambda: 7, replica_id="replica-1", epoch="epoch-1"
        )
        self.updates: list[EngineUpdate] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], list[FinishReason]] = {}
        self.errors: dict[tuple[str, int], ErrorInfo | None] = {}

    def submit(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.engine.submit(request, self.clock())

    def step(self) -> EngineUpdate:
        update = self.engine.step()
        self.keep(update)
        return update

    def keep(self, update: EngineUpdate) -> None:
        self.updates.append(update)
        columns = zip(update.request_ids, update.indexes, update.token_ids, strict=True)
        for row, (request_id, index, token) in enumerate(columns):
            key = (request_id, index)
            if token != PENDING_TOKEN:
                self.tokens.setdefault(key, []).append(token)
            if (reason := update.finish_reasons[row]) is not None:
                self.ends.setdefault(key, []).append(reason)
                self.errors[key] = update.errors[row]

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


@asynccontextmanager
async def running(
    config: EngineConfig, factory: Callable[..., tuple[ModelRunner, ModelCard]], **options: Any
) -> AsyncIterator[ReplicaService]:
    """A started service, closed afterwards; in-thread unless said otherwise."""
    service = await ReplicaService.start(
        config, replica_id="replica-1", model_name="fake", runner_factory=factory, **{"in_thread": True, **options}
    )
    try:
        yield service
    finally:
        await service.close()


@dataclass
class Answered:
    """All that a consumer got for one request."""

    events: list[TokenEvent] = field(default_factory=list)
    num_messages: int = 0

    def text(self, index: int = 0) -> str:
        return "".join(event.text for event in self.events if event.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for event in self.events if event.index == index for token in event.token_ids]

    def end(self, index: int = 0) -> TokenEvent:
        ends = [event for event in self.events if event.index == index and event.finish_reason is not None]
        assert len(ends) == 1, f"{len(ends)} ends for index {index}"
        return ends[0]


async def answer(service: ReplicaService, request: GenerationRequest) -> Answered:
    """Reads a request's stream to its end."""
    answered = Answered()
    async for message in read(service, request):
        answered.num_messages += 1
        answered.events += message.events
    return answered


def oracle(request: GenerationRequest, index: int = 0) -> list[int]:
    """The tokens that a healthy fake replica gives to a request with this seed (greedy ones need none)."""
    return FakeModel(fake_shape()).alone(request, sequence_seed(request.sampling.seed or 0, index))[0]


def sample(service: ReplicaService, name: str, **labels: str) -> float:
    """A metric's value now."""
    value = service.metrics.registry.get_sample_value(
        f"brimful_{name}", {"model_name": "fake", "replica": "replica-1", **labels}
    )
    assert value is not None, name
    return value


def assert_quiet(service: ReplicaService) -> None:
    """Nothing runs, waits or is held, and the gauges say so."""
    load = service.load()
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "oldest_waiting_seconds"):
        assert sample(service, gauge) == 0.0


async def settled(service: ReplicaService) -> None:
    """Waits until the engine has nothing left to do."""
    async with asyncio.timeout(10):
        while service.load().num_running or service.load().num_waiting:
            await asyncio.sleep(0)
