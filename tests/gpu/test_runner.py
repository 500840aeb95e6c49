"""The runner on the device: answers, captured steps, waiting, and the memory of the pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from replica.config import ModelConfig, SchedulerConfig
from replica.model.runner import Runner, load_runner
from replica.model.support import dense_logits
from replica.model.warmup import peak_plan
from replica.model_card import ModelCard
from replica.request import SamplingParams
from replica.scheduler.plan import PENDING_TOKEN
from tests.model.generation import count_near_ties, generate, greedy, reference_answers, scheduler_for
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import VOCAB_SIZE, save_tiny

_FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "phi3", "gpt_oss", "mixtral", "opt"]
_ROUTED = ("gpt_oss", "mixtral")  # rounding sends a token to another expert: no tolerance says what is right
_LENGTHS = (5, 23, 40, 1, 17)
_NUM_TOKENS = 9
_MAX_ROWS = 6

Load = Callable[..., tuple[Runner, list[str]]]


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads on the device; gives the runner and what was said. Closes all at the end."""
    runners: list[Runner] = []

    def loaded(card: ModelCard, **settings: object) -> tuple[Runner, list[str]]:
        lines: list[str] = []
        options = {"device": "cuda", "dtype": "float32", "num_blocks": 64, **settings}
        config = ModelConfig(model=card.folder, **options)  # type: ignore[arg-type]
        runners.append(load_runner(card, config, SchedulerConfig(_MAX_ROWS, 64), progress=lines.append))
        return runners[-1], lines

    yield loaded
    for runner in runners:
        runner.close()


def _prompts() -> list[list[int]]:
    choose = random.Random(3)
    return [[choose.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]


def _answers(runner: Runner, sampling: SamplingParams) -> list[list[int]]:
    """With two steps in flight, among blocks full of NaN."""
    scheduler = scheduler_for(runner.shape, max_num_seqs=_MAX_ROWS, budget=16)
    _fill_with_nan(runner, list(range(runner.shape.num_blocks)))
    return generate(runner, scheduler, _prompts(), sampling, overlap=True).tokens


def _fill_with_nan(runner: Runner, blocks: list[int]) -> None:
    for tensor in (*runner._cache.keys, *runner._cache.values):
        tensor[blocks] = float("nan")


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_family_answers_as_transformers_on_the_cpu(family: str, tmp_path: Path, load: Load) -> None:
    card = save_tiny(family, tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = reference_answers(dense, _prompts(), _NUM_TOKENS)
    runner, lines = load(card)
    print("\n".join(lines))
    assert count_near_ties(_answers(runner, greedy(_NUM_TOKENS)), expected) == 0


@pytest.mark.parametrize("family", _FAMILIES)
def test_captured_steps_give_the_tokens_of_eager_ones(family: str, tmp_path: Path, load: Load) -> None:
    card = save_tiny(family, tmp_path)
    captured, lines = load(card, attention_backend="triton")
    if captured._graphs is None:
        pytest.skip(next(line for line in lines if "not captured" in line))
    eager, _ = load(card, attention_backend="triton", enforce_eager=True)
    assert eager._graphs is None
    for sampling in (greedy(_NUM_TOKENS), SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, ignore_eos=True)):
        assert _answers(captured, sampling) == _answers(eager, sampling)


@pytest.mark.parametrize("family", [name for name in _FAMILIES if name not in _ROUTED])
def test_half_precision_stays_near_the_same_weights_run_densely(family: str, tmp_path: Path, load: Load) -> None:
    """`load_runner` compares as well; here with the model's own chunks and a decode, on the backend of `auto`."""
    runner, lines = load(save_tiny(family, tmp_path), dtype="bfloat16")
    print("\n".join(lines))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", device_map={"": "cuda"}
    )
    prompt = _prompts()[2]
    table = list(range(1 + len(prompt) // runner.shape.block_size))
    rows = [Row(0, 0, prompt[:30], table, 30), Row(0, 30, prompt[30:-1], table, 9), Row(0, 39, prompt[-1:], table, 1)]
    with torch.inference_mode():
        found = torch.cat([runner.logits(make_plan(1, [row])).clone() for row in rows])
        expected = dense_logits(model, torch.tensor(prompt, device="cuda")).float()
    assert float((found - expected).norm() / expected.norm()) < 0.1


@contextmanager
def _no_waiting() -> Iterator[None]:
    """An operation that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20},
                                      {"temperature": 0.8, "top_p": 0.9}])  # fmt: skip
@pytest.mark.parametrize("is_eager", [False, True])
def test_submitting_waits_for_nothing(is_eager: bool, settings: dict[str, float], tmp_path: Path, load: Load) -> None:
    runner, _ = load(save_tiny("llama", tmp_path), dtype="bfloat16", enforce_eager=is_eager)
    rows = [Row(lane, 0, [5, 9, 40], [lane]) for lane in range(3)]
    first = make_plan(1, rows, joined=range(3))
    sampling = SamplingParams(max_tokens=9, **settings)  # type: ignore[arg-type]
    first.joined[:] = [joined._replace(sampling=sampling) for joined in first.joined]
    decodes = [make_plan(step, [Row(lane, step + 1, [PENDING_TOKEN], [lane]) for lane in range(3)]) for step in (2, 3)]
    for plan in (first, *decodes):  # whatever is compiled or allocated at first use
        runner.submit(plan).result()
    with _no_waiting():
        steps = [runner.submit(plan) for plan in (first, *decodes)]
    assert all(0 <= token < VOCAB_SIZE for step in steps for token in step.result().token_ids)


def test_the_pool_keeps_to_the_share_of_memory(tmp_path: Path, load: Load) -> None:
    card = save_tiny("llama", tmp_path)
    total = torch.cuda.mem_get_info()[1]
    sizes = []
    for share in (0.3, 0.5):
        runner, lines = load(card, num_blocks=None, gpu_memory_utilization=share, dtype="bfloat16")
        print("\n".join(lines))
        used = total - torch.cuda.mem_get_info()[0]
        assert 0.8 * share * total < used <= share * total * 1.02
        runner.submit(peak_plan(runner.shape, SchedulerConfig(_MAX_ROWS, 64))).result()
        sizes.append(runner.shape.num_blocks)
        runner.close()
    assert sizes[0] < sizes[1]
