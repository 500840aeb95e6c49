"""Captured decode steps, proved without a GPU: the same ladder, padding and copies; what was recorded is done anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replica.config import ModelConfig, SchedulerConfig
from replica.model.graphs import EagerCapture, GraphCapture, Work, ladder
from replica.model.runner import Runner, load_runner
from replica.model_card import ModelCard
from replica.request import SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, StepPlan
from tests.model.generation import Run, generate, greedy, scheduler_for
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import VOCAB_SIZE, save_tiny

_MAX_ROWS = 6
_NUM_BLOCKS = 48
_PROMPT = [5, 9, 40, 77, 12]


@dataclass(slots=True)
class CountingCapture:
    """`EagerCapture` that counts how often the i-th recording is replayed: the largest size is recorded first."""

    replays: list[int] = field(default_factory=list)

    def capture(self, work: Work) -> Work:
        place = len(self.replays)
        self.replays.append(0)
        again = EagerCapture().capture(work)

        def replay() -> None:
            self.replays[place] += 1
            again()

        return replay


class FailingCapture:
    def capture(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class StaleCapture:
    """A recording that does nothing again."""

    def capture(self, work: Work) -> Work:
        work()
        return lambda: None


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def _load(
    card: ModelCard, capture: GraphCapture | None, lines: list[str] | None = None, backend: str = "reference"
) -> Runner:
    config = ModelConfig(
        model=card.folder, device="cpu", block_size=8, num_blocks=_NUM_BLOCKS, attention_backend=backend
    )
    said: list[str] = [] if lines is None else lines
    return load_runner(card, config, SchedulerConfig(_MAX_ROWS, 64), progress=said.append, capture=capture)


def _answers(runner: Runner, sampling: SamplingParams, *, overlap: bool = True) -> Run:
    """Requests of many lengths over poisoned blocks: batches of all widths."""
    choose = random.Random(4)
    prompts = [[choose.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 23, 1, 40, 9, 17, 30)]
    scheduler = scheduler_for(runner.shape, max_num_seqs=_MAX_ROWS, budget=16)
    scheduler.block_pool.on_poison = lambda blocks: _fill_with_nan(runner, list(blocks))
    _fill_with_nan(runner, list(range(_NUM_BLOCKS)))
    return generate(runner, scheduler, prompts, sampling, overlap=overlap)


def _fill_with_nan(runner: Runner, blocks: list[int]) -> None:
    for tensor in (*runner._cache.keys, *runner._cache.values):
        tensor[blocks] = float("nan")


def _is_captured(plan: StepPlan) -> bool:
    return set(plan.num_tokens) == {1} and set(plan.num_logits) == {1}


def test_the_ladder_is_dense_at_its_foot_and_ends_at_the_top() -> None:
    assert ladder(1) == (1,)
    assert ladder(6) == (1, 2, 4, 6)
    assert ladder(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert ladder(256) == (*ladder(64), 80, 96, 112, 128, 160, 192, 224, 256)
    assert ladder(100)[-2:] == (96, 100)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "gpt2"])
def test_captured_steps_give_the_tokens_of_eager_ones(family: str, tmp_path: Path) -> None:
    card = save_tiny(family, tmp_path)
    capture = CountingCapture()
    eager, replayed = _load(card, None), _load(card, capture)
    capture.replays = [0] * len(capture.replays)
    expected, found = _answers(eager, greedy(9)), _answers(replayed, greedy(9))
    assert found.tokens == expected.tokens
    num_decodes = sum(map(_is_captured, found.plans))
    assert sum(capture.replays) == num_decodes >= 10
    assert sum(not _is_captured(plan) for plan in found.plans) > 5


def test_sampled_tokens_are_the_same_too(card: ModelCard) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, ignore_eos=True)
    expected = _answers(_load(card, None), sampling, overlap=False)
    assert _answers(_load(card, EagerCapture()), sampling).tokens == expected.tokens


def test_a_step_takes_the_next_larger_size(card: ModelCard) -> None:
    capture = CountingCapture()
    runner = _load(card, capture)
    rows = [Row(lane, 0, [_PROMPT[lane % 5]], [lane]) for lane in range(_MAX_ROWS)]
    for num_rows, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)):
        capture.replays = [0] * 4
        runner.submit(make_plan(1, rows[:num_rows], joined=range(num_rows))).result()
        assert capture.replays == [int(size == other) for other in (6, 4, 2, 1)]


def test_what_lies_in_the_spare_block_reaches_nobody(card: ModelCard) -> None:
    eager, runner = _load(card, None), _load(card, EagerCapture())
    for loaded in (eager, runner):
        rows = [Row(lane, 0, _PROMPT, [lane]) for lane in range(3)]
        loaded.submit(make_plan(1, rows, joined=range(3))).result()
    _fill_with_nan(runner, [_NUM_BLOCKS])
    decodes = make_plan(2, [Row(lane, 5, [PENDING_TOKEN], [lane]) for lane in range(3)])
    expected, found = eager.submit(decodes).result(), runner.submit(decodes).result()
    assert found.failed_rows == {}
    assert found.token_ids == expected.token_ids


def test_a_row_with_nan_in_its_context_fails_alone(card: ModelCard) -> None:
    runner = _load(card, EagerCapture())
    rows = [Row(lane, 0, _PROMPT, [lane]) for lane in range(2)]
    runner.submit(make_plan(1, rows, joined=range(2))).result()
    decodes = make_plan(2, [Row(lane, 5, [7], [lane]) for lane in range(2)])
    wanted = runner.submit(decodes).result().token_ids
    _fill_with_nan(runner, [0])
    found = runner.submit(decodes).result()
    assert found.failed_rows == {0: "non_finite_logits"}
    assert found.token_ids == [0, wanted[1]]


def test_a_pending_token_is_the_draw_before_even_when_steps_run_again(card: ModelCard) -> None:
    runner = _load(card, EagerCapture())
    table = [3, 7]
    tokens = [runner.submit(make_plan(1, [Row(2, 0, _PROMPT, table)], joined=(2,))).result().token_ids[0]]
    plans = [make_plan(step, [Row(2, 3 + step, [PENDING_TOKEN], table)]) for step in (2, 3, 4)]
    tokens += [runner.submit(plan).result().token_ids[0] for plan in plans]
    assert [runner.submit(plan).result().token_ids[0] for plan in plans[1:]] == tokens[2:]
    known = [make_plan(9 + place, [Row(2, 5 + place, [token], table)]) for place, token in enumerate(tokens[:3])]
    assert [runner.submit(plan).result().token_ids[0] for plan in known] == tokens[1:]


def test_a_bad_plan_raises_and_the_next_step_is_unharmed(card: ModelCard) -> None:
    runner = _load(card, EagerCapture())
    good = Row(0, 0, [5], [0])
    wanted = runner.submit(make_plan(1, [good], joined=(0,))).result().token_ids
    for bad in (Row(1, 8, [1], [2]), Row(1, 0, [1], [_NUM_BLOCKS])):
        with pytest.raises(IndexError, match="row 1 has no block for position"):
            runner.submit(make_plan(2, [good, bad], joined=(1,)))
    assert runner.submit(make_plan(3, [good])).result().token_ids == wanted


def test_a_model_that_can_not_be_recorded_runs_eagerly_and_says_why(card: ModelCard) -> None:
    lines: list[str] = []
    runner = _load(card, FailingCapture(), lines)
    assert lines[-1] == (
        "decode steps are not captured: RuntimeError: operation not permitted when stream is capturing"
    )
    expected = _answers(_load(card, None), greedy(5))
    assert _answers(runner, greedy(5)).tokens == expected.tokens


def test_a_recording_that_computes_something_else_is_not_used(card: ModelCard) -> None:
    lines: list[str] = []
    runner = _load(card, StaleCapture(), lines)
    assert lines[-1].startswith("decode steps are not captured: the logits of 1 rows are off by")
    assert _answers(runner, greedy(5)).tokens == _answers(_load(card, None), greedy(5)).tokens


def test_a_backend_that_prepares_each_step_anew_is_not_captured(card: ModelCard) -> None:
    lines: list[str] = []
    _load(card, EagerCapture(), lines, backend="gather")
    assert lines[-1] == "decode steps are not captured: this attention backend prepares each step anew"


def test_a_closed_runner_replays_nothing(card: ModelCard) -> None:
    runner = _load(card, EagerCapture())
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(make_plan(1, [Row(0, 0, [1], [0])]))
