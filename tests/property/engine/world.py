"""A driven engine over the fake model, what was asked of it, and what it must have answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from replica.engine import sequence_seed
from replica.model.api import InFlightStep, ModelRunner, ModelShape
from replica.model.fake import FakeModel
from replica.model.late import LateRunner
from replica.request import FinishReason, GenerationRequest
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config

SHAPE = fake_shape(num_blocks=24, block_size=4, max_model_len=64)
POISON = 93

Action = tuple[str, int]
Key = tuple[str, int]

DEVICES = ("host", "fast", "one step late", "as late as can be")
"""The first computes in `submit` and is no device of its own; the others let the engine plan ahead."""


@dataclass(slots=True)
class Watched:
    """Passes steps on; `draws`: by sequence, the numbers of all draws that were ever submitted."""

    runner: ModelRunner
    draws: dict[int, set[int]] = field(default_factory=dict)
    num_steps: int = 0

    @property
    def shape(self) -> ModelShape:
        return self.runner.shape

    @property
    def is_async(self) -> bool:
        return self.runner.is_async

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.num_steps += 1
        for seq_id, samples, number in zip(plan.seq_ids, plan.samples, plan.output_index, strict=True):
            if samples:
                self.draws.setdefault(seq_id, set()).add(number)
        return self.runner.submit(plan)

    def close(self) -> None:
        self.runner.close()


class World:
    """`device` is one of `DEVICES`; `faults` are fields of the model, `changes` of the settings."""

    def __init__(
        self,
        device: str,
        faults: dict[str, Any],
        changes: dict[str, Any],
        shape: ModelShape = SHAPE,
        model_class: type[FakeModel] = FakeModel,
    ) -> None:
        self.model = model = model_class(shape, is_async=device == "fast", **faults)
        lag = {"one step late": 1, "as late as can be": 2}.get(device)
        late = None if lag is None else LateRunner(model, lag, model.poison)
        self.runner = Watched(late or model)
        self.driver = EngineDriver(small_config(**{"queue_timeout_s": 300.0, **changes}), self.runner)
        self.driver.engine._scheduler.block_pool.on_poison = (late or model).poison
        self.healthy = FakeModel(shape, eos_ratio=model.eos_ratio)
        self.requests: list[GenerationRequest] = []
        self.seq_ids: dict[Key, int] = {}
        self.num_wasted = 0

    def act(self, name: str, size: int) -> None:
        if name == "submit":
            self.submit(size)
        elif name == "abort" and self.requests:
            request = self.requests[size % len(self.requests)]
            self.driver.engine.end(request.request_id, None if size % 3 else size % request.n)
        elif name == "budget":
            num_seqs = 1 + size % 4
            num_tokens = num_seqs + 1 + size % (16 - num_seqs)
            self.driver.engine.set_budgets({"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens})
        elif name == "step":
            for _ in range(size % 4):
                self.driver.step()
        elif name == "wait":
            self.driver.clock.now_s += size

    def submit(self, size: int) -> None:
        self.submit_request(
            num_prompt=1 + size % 40,
            max_tokens=1 + size % 13,
            first=size % 7,
            n=1 + size % 3 % 2,
            temperature=float(size % 2),
            seed=size,
            ignore_eos=bool(size % 5),
            priority=size % 3,
        )

    def submit_request(self, **fields: Any) -> None:
        """`fields` as `request_of` takes them."""
        request = request_of(f"r{len(self.requests)}", **fields)
        self.requests.append(request)
        self.driver.submit(request)
        for index, seq_id in self.driver.engine._requests.get(request.request_id, {}).items():
            self.seq_ids[request.request_id, index] = seq_id

    def play(self, plan: list[Action]) -> None:
        """All actions, then steps until nothing is left to do."""
        for name, size in plan:
            self.act(name, size)
        self.driver.run(5000)

    def check(self) -> None:
        """One end each, the tokens that each makes alone, at most one wasted, and nothing held."""
        for request in self.requests:
            self._check_ends(request)
        for key, seq_id in self.seq_ids.items():
            self._check_waste(key, seq_id)
        load = self.driver.engine.idle_update().load
        assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)
        engine = self.driver.engine
        assert not (engine._sequences or engine._requests or len(engine._pipeline)), "something is left over"
        assert not (engine._scheduler._state.in_flight or engine._scheduler._state.ended), "something is left over"

    def _check_ends(self, request: GenerationRequest) -> None:
        driver = self.driver
        if driver.ends.get((request.request_id, 0)) == [FinishReason.REJECTED]:
            assert all((request.request_id, index) not in driver.tokens for index in range(request.n))
            return
        for index in range(request.n):
            key = (request.request_id, index)
            made = driver.tokens.get(key, [])
            alone, reason = self.healthy.alone(request, sequence_seed(request.sampling.seed or 0, index))
            (ended,) = driver.ends[key]
            if ended in (FinishReason.STOP, FinishReason.LENGTH):
                assert (made, ended) == (alone, reason)
            else:
                assert made == alone[: len(made)]
            if ended is FinishReason.ERROR:
                assert POISON in (*request.prompt_ids, *alone[: len(made) + 1])

    def _check_waste(self, key: Key, seq_id: int) -> None:
        (ended,), num_made = self.driver.ends[key], len(self.driver.tokens.get(key, []))
        wasted = [number for number in self.runner.draws.get(seq_id, ()) if number >= num_made]
        if ended is FinishReason.LENGTH:
            assert not wasted, "an end that is known beforehand costs nothing"
        elif ended is FinishReason.STOP:
            assert len(wasted) <= self.runner.is_async, "a stop found late costs one token"
            self.num_wasted += len(wasted)


@st.composite
def actions(draw: st.DrawFn) -> list[Action]:
    names = st.sampled_from(["submit", "submit", "submit", "step", "step", "abort", "budget", "wait"])
    return draw(st.lists(st.tuples(names, st.integers(0, 400)), min_size=1, max_size=40))
