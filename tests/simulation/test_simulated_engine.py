"""The simulated replica and the real engine, given the same requests at the same times, plan the same steps."""

from __future__ import annotations

from typing import Any

import pytest

from bench.simulate.replica import SimulatedReplica
from bench.simulate.step_cost import StepCost
from bench.simulate.step_totals import StepTotals
from bench.traces.generate import generate
from replica.config import EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.model.api import InFlightStep, ModelShape
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import StepPlan

COST = StepCost(fixed_s=0.5, prefill_token_s=1 / 64, decode_seq_s=1 / 32, kv_token_s=1 / 1024, prefill_pair_s=0.0)
SHAPE = ModelShape(num_blocks=24, block_size=16, vocab_size=1000, max_model_len=300, eos_token_ids=())


class TimedModel:
    """The fake model, on whose device a step lasts as long as the cost says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
        self._model = FakeModel(SHAPE)

    @property
    def shape(self) -> ModelShape:
        return SHAPE

    @property
    def is_async(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.steps.append((self.now_s, tuple(plan.starts), tuple(plan.num_tokens)))
        self.now_s += COST.of_plan(plan)
        return self._model.submit(plan)

    def close(self) -> None:
        self._model.close()


class RecordedCost:
    """The cost, and which plans it was asked about."""

    def __init__(self) -> None:
        self.plans: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def of_plan(self, plan: StepPlan) -> float:
        self.plans.append((tuple(plan.starts), tuple(plan.num_tokens)))
        return COST.of_plan(plan)


def orders() -> list[tuple[float, GenerationRequest]]:
    trace = generate("W2", 40, 5, 1.0).scaled(16)
    return [
        (
            trace.arrival_s[number],
            GenerationRequest(
                str(number),
                trace.prompt_ids(number, SHAPE.vocab_size),
                SamplingParams(trace.output_tokens[number], temperature=0.0, seed=0, ignore_eos=True),
            ),
        )
        for number in range(len(trace))
    ]


def on_the_engine(config: SchedulerConfig) -> tuple[list[Any], dict[int, tuple[float | None, float | None, int]]]:
    """Steps, and for each request (first token, end, preemptions)."""
    model = TimedModel()
    engine = Engine(
        EngineConfig(scheduler=config),
        model,
        clock=lambda: model.now_s,
        random_seed=lambda: 0,
        replica_id="replica-0",
        epoch="1",
    )
    coming, ends = orders(), {}
    while coming or engine.has_work:
        if not engine.has_work:
            model.now_s = max(model.now_s, coming[0][0])
        while coming and coming[0][0] <= model.now_s:
            at_s, request = coming.pop(0)
            engine.submit(request, at_s)
        update = engine.step()
        for request_id, timings in zip(update.request_ids, update.timings, strict=True):
            if timings is not None:
                ends[int(request_id)] = (timings.first_token_at_s, timings.finished_at_s, timings.num_preemptions)
    return model.steps, ends


PRESSED: dict[str, Any] = {"watermark": 0.0, "scheduler_reserve_full_isl": False}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3, "long_prefill_token_threshold": 20},
        {"batching": "static"},
        PRESSED,
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 300},
    ],
    ids=str,
)
def test_same_requests_same_steps_same_times(settings: dict[str, Any]) -> None:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 48, "queue_timeout_s": 1e9, **settings})
    cost, totals = RecordedCost(), StepTotals(keep_steps=True)
    replica = SimulatedReplica(config, SHAPE, cost, totals)  # type: ignore[arg-type]
    for number, (at_s, request) in enumerate(orders()):
        replica.submit(number, request, at_s)
    replica.advance(float("inf"))

    steps, ends = on_the_engine(config)
    assert [(starts, chunks) for _, starts, chunks in steps] == cost.plans
    assert totals.columns is not None
    assert [start_s for start_s, _, _ in steps] == list(totals.columns.start_s)
    finished = [end for end in replica.ended if end.reason is FinishReason.LENGTH]
    assert {end.number: (end.first_token_s, end.end_s, end.num_preemptions) for end in finished} == ends
    assert (len(finished), len(replica.ended)) == (38, 40)  # two prompts are too long for the pool
    num_preemptions = sum(count for _, _, count in ends.values())
    assert num_preemptions >= (10 if settings is PRESSED else 0), "nothing is kept free, and nobody is preempted"
