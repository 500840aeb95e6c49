"""Logits of a few prompts through blocks, in ragged chunks among neighbours, and by transformers' dense forward."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replica.config import ModelConfig, SchedulerConfig
from replica.model.runner import Runner, load_runner
from replica.model_card import ModelCard
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import VOCAB_SIZE

NUM_BLOCKS, BLOCK_SIZE = 48, 8
_LENGTHS = (7, 40, 1, 23)
_CHUNKS = (7, 1, 13)


def load(card: ModelCard, folder: Path, *, dtype: str = "auto") -> Runner:
    """With room for all prompts."""
    config = ModelConfig(model=str(folder), device="cpu", dtype=dtype, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    return load_runner(card, config, SchedulerConfig(8, 64), progress=lambda _: None)


def prompts() -> list[list[int]]:
    choose = random.Random(3)
    return [[choose.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]


def fill_with_nan(runner: Runner, blocks: list[int]) -> None:
    for tensor in (*runner._cache.keys, *runner._cache.values):
        tensor[blocks] = float("nan")


def paged_logits(runner: Runner) -> Tensor:
    """Of every token, prompt by prompt. Each step has a chunk of every prompt that isn't done; blocks lie anywhere."""
    texts = prompts()
    blocks = list(range(NUM_BLOCKS))
    random.Random(1).shuffle(blocks)
    fill_with_nan(runner, blocks)
    tables = [[blocks.pop() for _ in range(-(-len(text) // BLOCK_SIZE))] for text in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    starts = [0] * len(texts)
    step = 0
    while any(start < len(text) for start, text in zip(starts, texts, strict=True)):
        step += 1
        rows = [row for row, text in enumerate(texts) if starts[row] < len(text)]
        chunks = [texts[row][starts[row] :][: _CHUNKS[(step + row) % 3]] for row in rows]
        plan = make_plan(step, [Row(r, starts[r], c, tables[r], len(c)) for r, c in zip(rows, chunks, strict=True)])
        with torch.inference_mode():
            parts = torch.split(runner.logits(plan), [len(chunk) for chunk in chunks])
        for row, chunk, part in zip(rows, chunks, parts, strict=True):
            found[row].append(part)
            starts[row] += len(chunk)
    return torch.cat([part for parts in found for part in parts])


def dense_logits(dense: PreTrainedModel) -> Tensor:
    """Of the same tokens, every prompt in a forward of its own, without a cache."""
    with torch.inference_mode():
        return torch.cat([dense(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in prompts()])


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, in the 2-norm; NaN when either holds NaN."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
