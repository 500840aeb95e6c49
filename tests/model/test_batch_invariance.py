"""With `batch_invariant`, a sequence's logits and tokens are the same to the last bit however it is scheduled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ModelUnsupported
from replica.model.api import ModelShape
from replica.model.attention.backend import AttentionBackend
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.inputs import IntArray, StepLayout
from replica.model.kv_cache import KVCache
from replica.model.runner import Runner, load_runner
from replica.model.tiles import TILE, require_dense_layers, require_invariance, tile_plans
from replica.request import SamplingParams
from replica.scheduler.plan import StepPlan
from tests.model.embedded import chat_prompts, embedded_card
from tests.model.generation import count_near_ties, generate, greedy, reference_answers, scheduler_for
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import VOCAB_SIZE, make_model, save_tiny

_LENGTHS = (15, 62, 46, 1, 31)
_NUM_TOKENS = 6
_TIGHT = 10


def _prompts() -> list[list[int]]:
    choose = random.Random(3)
    return [[choose.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp(request.param)
    card = save_tiny(request.param, folder)
    config = ModelConfig(model=str(folder), device="cpu", block_size=16, num_blocks=64, batch_invariant=True)
    loaded = load_runner(card, config, SchedulerConfig(8, 200), progress=lambda _: None)
    yield loaded
    loaded.close()


def _answers_in_every_way(
    runner: Runner, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[list[int]]:
    """The answers alone, after checking that every other way gives the same."""
    alone = [
        generate(runner, scheduler_for(runner.shape), [prompt], sampling, seeds=[seed]).tokens[0]
        for seed, prompt in enumerate(prompts)
    ]
    together = scheduler_for(runner.shape)
    assert generate(runner, together, prompts, sampling, overlap=True).tokens == alone
    hit = generate(runner, together, prompts, sampling)
    assert max(hit.num_cached_tokens) > 0
    assert hit.tokens == alone
    for budget in (9, 50):
        scheduler = scheduler_for(runner.shape, budget=budget)
        assert generate(runner, scheduler, prompts, sampling).tokens == alone, f"budget {budget}"
    tight = generate(runner, scheduler_for(runner.shape, num_blocks=_TIGHT), prompts, sampling)
    assert tight.num_preemptions > 0
    assert tight.tokens == alone
    return alone


def test_tokens_are_strictly_equal_however_they_are_scheduled(runner: Runner) -> None:
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=1.0, top_p=0.95, ignore_eos=True)
    _answers_in_every_way(runner, _prompts(), sampling)


def test_logits_are_strictly_equal_alone_and_among_neighbours(runner: Runner) -> None:
    prompts = _prompts()[:4]
    tables = [[9 * row + block for block in range(5)] for row in range(4)]
    with torch.inference_mode():
        for chunk in (7, 64):
            wanted = runner.logits(make_plan(1, [Row(0, 0, prompts[1], tables[1], num_logits=len(prompts[1]))]))
            parts = []
            for start in range(0, len(prompts[1]), chunk):
                mine = Row(
                    1, start, prompts[1][start : start + chunk], tables[1], len(prompts[1][start : start + chunk])
                )
                rows = [Row(0, 0, prompts[0], tables[0], 0), mine, Row(2, 0, prompts[2], tables[2], 0)]
                parts.append(runner.logits(make_plan(1, rows)))
            assert torch.equal(torch.cat(parts), wanted)


def test_answers_equal_transformers(tmp_path: Path) -> None:
    card = save_tiny("gpt_oss", tmp_path)  # windows and sinks; its experts make it refuse batch invariance
    config = ModelConfig(model=str(tmp_path), device="cpu", block_size=8, num_blocks=64, batch_invariant=True)
    with pytest.raises(ModelUnsupported, match="gpt_oss routes tokens to experts"):
        load_runner(card, config, SchedulerConfig(8, 64), progress=lambda _: None)
    card = save_tiny("gemma2", tmp_path)
    invariant = load_runner(card, config, SchedulerConfig(8, 64), progress=lambda _: None)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = reference_answers(dense, _prompts(), _NUM_TOKENS)
    run = generate(invariant, scheduler_for(invariant.shape), _prompts(), greedy(_NUM_TOKENS))
    assert count_near_ties(run.tokens, expected) == 0


def test_a_step_becomes_full_tiles_of_single_tokens() -> None:
    rows = [Row(3, 5, [7] * 40, [1, 2, 3], num_logits=2), Row(1, 9, [8], [4, 5], num_logits=1)]
    first, second = tile_plans(make_plan(6, rows), spare_block=99)
    assert (len(first), len(second), first.step, second.step) == (TILE, TILE, 6, 6)
    assert first.starts == list(range(5, 37))
    assert second.starts[:9] == [*range(37, 45), 9]
    assert second.lanes[:9] == [3] * 8 + [1]
    assert second.num_logits == [0] * 6 + [1, 1, 1] + [0] * 23
    assert second.block_tables[8:] == [[4, 5]] + [[99]] * 23
    assert second.token_ids == [7] * 8 + [8] + [0] * 23


def test_kernels_that_mix_rows_are_refused() -> None:
    def mixing(plan: StepPlan) -> torch.Tensor:
        tokens = torch.tensor(plan.token_ids, dtype=torch.float32)
        return (tokens + tokens.sum() * 1e-6)[:, None]

    with pytest.raises(ModelUnsupported, match="can't be batch-invariant on this machine"):
        require_invariance("m", mixing, ModelShape(7, 16, 100, 200, ()))
    require_dense_layers(make_model("llama"))


@dataclass(slots=True)
class _Harmed:
    """A backend whose attention of every token with a context of its own is off in the last bits, by how long another
    context of the step is."""

    backend: AttentionBackend
    other: Callable[[IntArray], int]

    @property
    def block_size(self) -> int:
        return self.backend.block_size

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        step = self.backend.prepare(layout, cache)
        factor = 1.0 + 1e-6 * self.other(layout.context_lens)
        return _HarmedStep(step, torch.where(torch.from_numpy(layout.context_lens) > 1, factor, 1.0)[:, None, None])


@dataclass(slots=True)
class _HarmedStep:
    step: AttentionStep
    factors: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.step.attend(call) * self.factors


@pytest.mark.parametrize(
    "other",
    [lambda lens: lens.max(), lambda lens: lens.min(), lambda lens: lens.sum()],
    ids=["longest", "least", "sum"],
)
def test_attention_that_sees_its_neighbours_contexts_is_refused(
    runner: Runner, other: Callable[[IntArray], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        require_invariance("m", runner.logits, runner.shape)
        monkeypatch.setattr(runner, "_backend", _Harmed(runner._backend, other))
        with pytest.raises(ModelUnsupported, match="a token's logits change with its place in the step"):
            require_invariance("m", runner.logits, runner.shape)


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 4), (1, 1), (2, 40), (64, 20), (64, 33)])
def test_small_pools_and_short_contexts_are_tested_within_their_bounds(num_blocks: int, max_model_len: int) -> None:
    shape, block_size = ModelShape(num_blocks, 16, 100, max_model_len, ()), 16
    tested: list[int] = []

    def logits(plan: StepPlan) -> torch.Tensor:
        for start, count, table in zip(plan.starts, plan.num_tokens, plan.block_tables, strict=True):
            assert count > 0 and start + count <= max_model_len
            assert len(table) >= -(-(start + count) // block_size)
            assert 0 <= min(table) <= max(table) <= num_blocks
        tested.extend(start for start, token in zip(plan.starts, plan.token_ids, strict=False) if token == 1)
        return torch.ones(len(plan.token_ids), 100)

    require_invariance("m", logits, shape)
    assert min(2 * 16 + 8, num_blocks * 16 - 1, max_model_len - 1) in tested


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_is_strictly_equal_too() -> None:
    config = ModelConfig(num_blocks=128, block_size=32, device="cpu", batch_invariant=True)
    real = load_runner(embedded_card(), config, SchedulerConfig(8, 200), progress=lambda _: None)
    prompts = chat_prompts()[:8]
    alone = [generate(real, scheduler_for(real.shape), [prompt], greedy(8)).tokens[0] for prompt in prompts]
    for budget, num_blocks in ((200, None), (16, None), (64, 10)):
        scheduler = scheduler_for(real.shape, budget=budget, num_blocks=num_blocks)
        assert generate(real, scheduler, prompts, greedy(8)).tokens == alone
