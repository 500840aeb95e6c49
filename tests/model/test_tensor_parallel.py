"""A model over two processes answers as over one, through chunks, prefix hits, preemptions and failed steps; a rank
that dies ends the runner within seconds; what can't be split is refused at the start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import EngineDead, ResourceError, SettingError
from replica.model.api import ModelRunner
from replica.model.runner import load_runner
from replica.model.tensor_parallel import runner as runner_module
from replica.model.tensor_parallel.load import load_sharded
from replica.model.tensor_parallel.ranks import NOTICE_S
from replica.model.tensor_parallel.runner import TensorParallelRunner
from replica.model_card import ModelCard
from replica.request import SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, StepPlan
from tests.model.generation import Run, generate, greedy, scheduler_for
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import VOCAB_SIZE, save_tiny

SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
BLOCK_SIZE, NUM_BLOCKS = 8, 64
NUM_TOKENS = 10
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, top_k=40, ignore_eos=True)
LOSS_LIMIT_S = 60.0


def prompts() -> list[list[int]]:
    """Of several lengths; the last two begin as the third, which is longer than a step."""
    drawn = [
        [3 + (number * 37 + i * 11) % (VOCAB_SIZE - 3) for i in range(length)]
        for number, length in enumerate((5, 17, 90, 33))
    ]
    return [*drawn, [*drawn[2][:40], 7, 8, 9], [*drawn[2][:64], 5]]


def config_for(card: ModelCard, num_shards: int) -> ModelConfig:
    return ModelConfig(
        model=card.source,
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_threads=num_shards,
        tensor_parallel_size=num_shards,
    )


class Losses:
    """What the watch over the ranks told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.came = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.came.set()


@contextmanager
def split(card: ModelCard, losses: Losses | None = None) -> Iterator[TensorParallelRunner]:
    """Over two processes, of which none is left afterwards."""
    runner = load_sharded(card, config_for(card, 2), SCHEDULER, progress=lambda line: None, on_loss=losses or Losses())
    pids = runner.rank_pids
    try:
        yield runner
    finally:
        runner.close()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def whole(card: ModelCard) -> ModelRunner:
    return load_runner(card, config_for(card, 1), SCHEDULER, progress=lambda line: None)


def answers(runner: ModelRunner) -> dict[str, Run]:
    """What the model says in several circumstances: each plan made before its predecessor's commit, prefixes cached,
    too few blocks."""
    scheduler = scheduler_for(runner.shape, budget=32)
    cramped = scheduler_for(runner.shape, num_blocks=8, budget=32)
    return {
        "overlapped": generate(runner, scheduler, prompts(), greedy(NUM_TOKENS), overlap=True),
        "hit": generate(runner, scheduler, prompts(), SEEDED),
        "preempted": generate(runner, cramped, [prompt[-7:] for prompt in prompts()], SEEDED),
    }


def require_same(found: dict[str, Run], expected: dict[str, Run]) -> None:
    for name, run in expected.items():
        assert found[name].tokens == run.tokens, name
        assert found[name].num_cached_tokens == run.num_cached_tokens, name
    assert any(PENDING_TOKEN in plan.token_ids for plan in expected["overlapped"].plans)
    assert max(expected["hit"].num_cached_tokens) >= 40
    assert expected["preempted"].num_preemptions > 0
    longest = max(max(plan.num_tokens) for plan in expected["overlapped"].plans)
    assert longest < len(prompts()[2]), "the long prompt came in one piece"


def one_row(step: int, token_ids: Sequence[int], table: list[int], lane: int = 0) -> StepPlan:
    return make_plan(step, [Row(lane, 0, token_ids, table)], joined=[lane] if lane < 8 else [])


def test_two_processes_answer_as_one_and_a_killed_rank_ends_the_runner(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    expected, losses = answers(whole(card)), Losses()
    with split(card, losses) as runner:
        require_same(answers(runner), expected)
        token = runner.submit(one_row(0, [5, 6, 7], [0])).result().token_ids
        # Steps that fail in all ranks at the same place: before the forward, and after it.
        for plan in (one_row(0, [5] * 9, [0]), one_row(0, [5, 6, 7], [0], lane=99)):
            with pytest.raises(IndexError):
                runner.submit(plan)
            assert runner.submit(one_row(0, [5, 6, 7], [0])).result().token_ids == token
        kill_in_a_step(runner)
        with pytest.raises(EngineDead, match="rank 1 of the model ended"):
            runner.submit(one_row(0, [5], [0]))
        assert losses.came.wait(LOSS_LIMIT_S)
        assert losses.reasons == ["rank 1 of the model ended (signal 9)"]


def kill_in_a_step(runner: TensorParallelRunner) -> None:
    """While the first rank waits for it in a collective. A first rank that went on waiting would run into the limit on
    the test's time."""
    (pid,) = runner.rank_pids
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(EngineDead):
        runner.submit(one_row(0, [5], [0]))
    timer.join()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma2", "phi3", "gpt_oss"])
def test_families_that_cut_their_layers_otherwise_answer_the_same(family: str, tmp_path: Path) -> None:
    card = save_tiny(family, tmp_path)
    expected = answers(whole(card))
    with split(card) as runner:
        require_same(answers(runner), expected)


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = save_tiny("llama", tmp_path)
    good = runner_module.plan_for_ranks

    def bad_table(plan: StepPlan, block_size: int) -> StepPlan:
        sent = good(plan, block_size)
        sent.block_tables = [[] for _ in sent.block_tables]
        return sent

    with split(card) as runner:
        monkeypatch.setattr(runner_module, "plan_for_ranks", bad_table)
        with pytest.raises(EngineDead, match="out of step"):
            runner.submit(one_row(0, [5], [0]))


@pytest.mark.slow
def test_a_size_that_does_not_divide_the_heads_is_refused_and_leaves_no_process(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path, hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    before, losses = {child.pid for child in psutil.Process().children(recursive=True)}, Losses()

    def be_slow(line: str) -> None:
        """The other rank has refused and ended before the first one looks; that is no loss."""
        if line.startswith("loading"):
            psutil.wait_procs(child for child in psutil.Process().children() if child.pid not in before)
            assert not losses.came.wait(NOTICE_S + 1)

    with pytest.raises(SettingError) as refused:
        load_sharded(card, config_for(card, 2), SCHEDULER, progress=be_slow, on_loss=losses)
    assert refused.value.message == (
        "tensor_parallel_size = 2 is not allowed: llama has 9 attention heads and 3 KV heads; "
        "sizes that divide all that is cut: 1, 3"
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


@pytest.mark.slow
def test_a_rank_that_dies_while_it_loads_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def kill_rank(line: str) -> None:
        if line.startswith("testing"):
            (rank,) = {child.pid for child in psutil.Process().children(recursive=True)} - before
            os.kill(rank, signal.SIGKILL)

    with pytest.raises(ResourceError) as refused:
        load_sharded(card, config_for(card, 2), SCHEDULER, progress=kill_rank, on_loss=Losses())
    assert refused.value.message == (
        "rank 1 of the model ended (signal 9), while it was loading; free memory, or choose a smaller model"
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
