"""The runner's contract: pending tokens, steps that run again, rows that fail alone, log-probabilities, limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ModelNotFound, ResourceError, SettingError
from replica.model.api import OutOfDeviceMemory
from replica.model.runner import Runner, load_runner
from replica.model_card import ModelCard
from replica.scheduler.plan import PENDING_TOKEN
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import MAX_POSITION, save_tiny

_PROMPT = [5, 9, 40, 77, 12]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(card: ModelCard) -> Iterator[Runner]:
    loaded = _load(card, num_blocks=32)
    yield loaded
    loaded.close()


def _load(card: ModelCard, **settings: object) -> Runner:
    config = ModelConfig(model=card.folder, **{"device": "cpu", "block_size": 4, **settings})  # type: ignore[arg-type]
    return load_runner(card, config, SchedulerConfig(4, 16), progress=lambda _: None)


def _tokens(runner: Runner, step: int, *rows: Row, joined: tuple[int, ...] = (), temperature: float = 0.0) -> list[int]:
    return runner.submit(make_plan(step, rows, joined=joined, temperature=temperature)).result().token_ids


def test_the_shape_says_what_the_scheduler_needs(card: ModelCard, runner: Runner) -> None:
    shape = runner.shape
    assert (shape.num_blocks, shape.block_size, shape.vocab_size) == (32, 4, 128)
    assert shape.max_model_len == 128  # 32 blocks of 4, less than the model's 256
    assert shape.eos_token_ids == (2,)
    assert shape.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_a_pending_token_is_the_lanes_last_sample(runner: Runner) -> None:
    table = [3, 7, 1]
    first = _tokens(runner, 1, Row(2, 0, _PROMPT, table), joined=(2,))[0]
    pending = _tokens(runner, 2, Row(2, 5, [PENDING_TOKEN], table))[0]
    known = _tokens(runner, 3, Row(2, 5, [first], table))[0]
    assert pending == known


def test_a_step_that_runs_again_gives_the_same_also_in_parts(runner: Runner) -> None:
    rows = [Row(lane, 0, [_PROMPT[lane], *_PROMPT], [lane * 3, lane * 3 + 1, lane * 3 + 2]) for lane in range(3)]
    runner.submit(make_plan(1, rows, joined=(0, 1, 2), temperature=1.0)).result()
    plan = make_plan(2, [row._replace(start=6, token_ids=[PENDING_TOKEN]) for row in rows])
    whole = runner.submit(plan).result().token_ids
    assert runner.submit(plan).result().token_ids == whole
    parts = [runner.submit(plan.select(part)).result().token_ids for part in ([0], [1, 2], [2])]
    assert parts == [whole[:1], whole[1:], whole[2:]]


def test_with_two_steps_in_flight_the_older_may_run_again(runner: Runner) -> None:
    """Step 2 shows its error late, when step 3 was submitted already: both run again, as they were and in parts."""
    rows = [Row(lane, 0, [_PROMPT[lane], *_PROMPT], [lane * 3, lane * 3 + 1, lane * 3 + 2]) for lane in range(3)]
    runner.submit(make_plan(1, rows, joined=(0, 1, 2), temperature=1.0)).result()
    second, third = (
        make_plan(step, [row._replace(start=4 + step, token_ids=[PENDING_TOKEN]) for row in rows]) for step in (2, 3)
    )
    wanted = [step.result().token_ids for step in (runner.submit(second), runner.submit(third))]
    assert wanted[0] != wanted[1]
    again = [step.result().token_ids for step in (runner.submit(second), runner.submit(third))]
    assert again == wanted
    for plan, tokens in zip((second, third), wanted, strict=True):
        assert runner.submit(plan.select([2, 0])).result().token_ids == [tokens[2], tokens[0]]


def test_a_step_planned_anew_does_not_see_what_the_undone_one_sampled(runner: Runner) -> None:
    """Steps 2 and 3 were rolled back; 4 makes the draw that 2 made, 5 the one that 3 made."""
    table = [3, 7, 1]
    runner.submit(make_plan(1, [Row(2, 0, _PROMPT, table)], joined=(2,), temperature=1.0)).result()
    plans = [make_plan(step, [Row(2, 3 + step, [PENDING_TOKEN], table)]) for step in (2, 3)]
    wanted = [runner.submit(plan).result().token_ids for plan in plans]
    again = [runner.submit(replace(plan, step=plan.step + 2)).result().token_ids for plan in plans]
    assert again == wanted


def test_rows_that_do_not_sample_say_so(runner: Runner) -> None:
    rows = [Row(0, 0, _PROMPT, [0, 1], num_logits=0), Row(1, 0, _PROMPT, [2, 3])]
    assert _tokens(runner, 1, *rows, joined=(0, 1))[0] == PENDING_TOKEN
    assert _tokens(runner, 2, rows[0]) == [PENDING_TOKEN]


def test_a_row_with_non_finite_logits_fails_alone_and_poisons_no_block(runner: Runner) -> None:
    good = Row(0, 0, _PROMPT, [0, 1])
    wanted = _tokens(runner, 1, good, joined=(0,))
    # A NaN in an earlier block of row 1's own context.
    runner._cache.keys[1][5] = float("nan")
    result = runner.submit(make_plan(2, [good, Row(1, 4, [8, 9, 10], [5, 6])], joined=(1,))).result()
    assert result.failed_rows == {1: "non_finite_logits"}
    assert result.token_ids[0] == wanted[0]
    # Its blocks, full of NaN now, go to another sequence that fills them only in part.
    assert runner._cache.values[2][6].isnan().any()
    assert _tokens(runner, 3, Row(2, 0, _PROMPT, [6, 5]), joined=(2,)) == wanted


def test_a_row_gives_the_logits_of_its_last_positions_and_samples_from_the_last(runner: Runner) -> None:
    alone = make_plan(1, [Row(0, 0, _PROMPT, [0, 1], num_logits=5), Row(1, 0, _PROMPT, [2, 3])], joined=(0, 1))
    sampled = runner.submit(alone).result().token_ids
    with torch.inference_mode():
        logits = runner.logits(alone)
        wanted = [runner.logits(make_plan(1, [Row(2, 0, _PROMPT[:end], [4, 5])]))[0] for end in range(1, 6)]
    torch.testing.assert_close(logits, torch.stack([*wanted, wanted[-1]]), atol=1e-5, rtol=1e-5)
    assert sampled == [int(wanted[-1].argmax())] * 2


def test_a_bad_plan_raises_and_the_next_step_is_unharmed(runner: Runner) -> None:
    good = Row(0, 0, _PROMPT, [0, 1])
    wanted = _tokens(runner, 1, good, joined=(0,))
    for bad in (Row(1, 0, [999], [2]), Row(1, 0, _PROMPT, [2]), Row(1, 0, [1], [99])):
        with pytest.raises((IndexError, RuntimeError)):
            runner.submit(make_plan(2, [good, bad], joined=(1,))).result()
    assert _tokens(runner, 3, good) == wanted


def test_running_out_of_memory_is_its_own_error(runner: Runner) -> None:
    model = runner._model
    assert model is not None
    forward = model.forward

    def too_large(**_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")

    model.forward = too_large
    with pytest.raises(OutOfDeviceMemory, match=r"^tried to allocate 9 GiB$"):
        runner.submit(make_plan(1, [Row(0, 0, _PROMPT, [0, 1])], joined=(0,)))
    model.forward = forward
    assert len(_tokens(runner, 2, Row(0, 0, _PROMPT, [0, 1]))) == 1


def test_a_closed_runner_computes_nothing(card: ModelCard) -> None:
    closed = _load(card, num_blocks=8)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.submit(make_plan(1, [Row(0, 0, _PROMPT, [0, 1])]))


def test_contexts_follow_the_settings(card: ModelCard) -> None:
    assert _load(card, num_blocks=100).shape.max_model_len == MAX_POSITION
    assert _load(card, num_blocks=100, max_model_len=64).shape.max_model_len == 64
    assert _load(card, kv_cache_memory_bytes=768 * 4 * 10).shape.num_blocks == 10
    with pytest.raises(ResourceError, match="doesn't fit the KV cache of 8 blocks = 32 tokens"):
        _load(card, num_blocks=8, max_model_len=64)
    with pytest.raises(ResourceError, match="more than the model's own limit"):
        _load(card, num_blocks=100, max_model_len=MAX_POSITION + 1)


def test_settings_that_name_nothing_here_are_refused(card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="device"):
        _load(card, device="tpu")
    with pytest.raises(ModelNotFound):
        _load(replace(card, weights_dir=str(tmp_path)), num_blocks=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loads_and_answers(card: ModelCard, dtype: str) -> None:
    half = _load(card, num_blocks=8, dtype=dtype)
    assert half.shape.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert 0 <= _tokens(half, 1, Row(0, 0, _PROMPT, [0, 1]), joined=(0,))[0] < 128
