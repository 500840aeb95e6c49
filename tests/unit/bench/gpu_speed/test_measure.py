"""Steps of the GPU benchmark: which fit, what they are, and that times are those of the clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bench.engine_speed.limits import MachineLimits, ModelLoad
from bench.gpu_speed.measure import StepKind, fill_pool, fits, plan_of, time_step
from bench.gpu_speed.models import LIMITS, MODELS, steps_on
from bench.gpu_speed.report import step_json, step_lines
from replica.model.api import InFlightStep, ModelShape
from replica.scheduler.plan import StepPlan, StepResult

_SHAPE = ModelShape(num_blocks=12, block_size=16, vocab_size=100, max_model_len=128, eos_token_ids=())


@dataclass(slots=True)
class TimedRunner:
    """A step takes `step_s` on the device, one after the other; the host waits only for results."""

    step_s: float
    shape: ModelShape = _SHAPE
    is_async: bool = True
    now_s: float = 0.0
    device_s: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.plans.append(plan)
        self.device_s = max(self.device_s, self.now_s) + self.step_s
        return _TimedStep(self, self.device_s)

    def close(self) -> None: ...


@dataclass(slots=True)
class _TimedStep:
    runner: TimedRunner
    done_s: float

    def result(self) -> StepResult:
        self.runner.now_s = max(self.runner.now_s, self.done_s)
        return StepResult(0, [])


def test_a_steps_rows_have_blocks_of_their_own() -> None:
    plan = plan_of(StepKind(width=3, context=20, count=2), _SHAPE)
    assert plan.block_tables == [[0, 1], [2, 3], [4, 5]]
    assert (plan.starts, plan.num_tokens, len(plan.token_ids)) == ([20] * 3, [2] * 3, 6)
    assert max(plan.token_ids) < 100
    assert [joined.lane for joined in plan.joined] == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (StepKind(4, 31, 1), True),
        (StepKind(5, 31, 1), False),  # more rows than a step takes
        (StepKind(4, 64, 1), False),  # 4 * 5 blocks
        (StepKind(1, 128, 1), False),  # longer than a context
        (StepKind(2, 0, 33), False),  # more tokens than a step takes
    ],
)
def test_what_pool_context_and_budgets_allow(kind: StepKind, wanted: bool) -> None:
    assert fits(kind, _SHAPE, 4, 64) is wanted


def test_the_pool_is_filled_as_far_as_steps_read_it() -> None:
    runner = TimedRunner(1.0)
    assert fill_pool(runner, [StepKind(1, 0, 5), StepKind(3, 40, 1)], 64) == 9 * 16
    assert [plan.block_tables for plan in runner.plans] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8]]]
    assert [len(plan.token_ids) for plan in runner.plans] == [64, 64, 16]


def test_times_are_the_clocks() -> None:
    runner = TimedRunner(0.25)
    timed = time_step(runner, StepKind(2, 10, 1), lambda: runner.now_s, repeats=4)
    assert (timed.step_s, timed.alone_s) == (0.25, 0.25)
    assert len(runner.plans) == 3 + 3 * (4 + 1)


def test_the_share_is_that_of_the_larger_limit() -> None:
    runner = TimedRunner(0.5)
    timed = time_step(runner, StepKind(2, 10, 1), lambda: runner.now_s, repeats=2)
    load = ModelLoad(body_weights=100, head_weights=50, weight_bytes=2, kv_bytes_per_token=8, ops_per_pair=4)
    # 150 weights and 22 + 2 tokens of KV: 492 bytes; 2 rows on 150 weights and 22 pairs: 688 operations.
    row = step_json(timed, load, MachineLimits(bandwidth=4920.0, rate=68800.0))
    assert (row["floor_ms"], row["share"], row["bound"]) == (pytest.approx(100.0), pytest.approx(0.2), "memory")
    assert row["tokens_per_s"] == pytest.approx(4.0)
    bound = step_json(timed, load, MachineLimits(bandwidth=492000.0, rate=6880.0))
    assert (bound["floor_ms"], bound["bound"]) == (pytest.approx(100.0), "arithmetic")
    lines = step_lines([row], MachineLimits(4.92e9, 1e12))
    assert lines[0] == "memory 5 GB/s, arithmetic 1.00 TFLOP/s, both of this run"
    assert lines[2].split() == [
        "2",
        "x",
        "decode,",
        "context",
        "10",
        "500.00",
        "500.00",
        "4",
        "100.00",
        "20%",
        "memory",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_measured_step_fits_the_budgets_and_a_large_pool(device: str) -> None:
    model = MODELS["tiny"]
    shape = ModelShape(10**6, 64, model["vocab_size"], model["max_position_embeddings"], ())
    assert all(fits(kind, shape, *LIMITS[device]) for kind in steps_on(device))
