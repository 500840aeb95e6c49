"""Steps that run before the first request: to check the pool's kernels, to measure memory, to warm up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replica.config import SchedulerConfig
from replica.model.api import InFlightStep, ModelShape
from replica.model.support import dense_logits, require_equal_logits
from replica.request import SamplingParams
from replica.scheduler.plan import JoinedSequence, StepPlan

_CHECK_TOKENS = 24


class WarmRunner(Protocol):
    """What of a runner is needed here."""

    @property
    def shape(self) -> ModelShape: ...

    def submit(self, plan: StepPlan) -> InFlightStep: ...

    def logits(self, plan: StepPlan) -> Tensor: ...

    def close(self) -> None: ...


RunnerT = TypeVar("RunnerT", bound=WarmRunner)


def dense_check(model: PreTrainedModel, shape: ModelShape) -> Tensor:
    """What `check_through_pool` is to find: the logits of transformers' own attention and modules, so call it before
    any is replaced."""
    return dense_logits(model, _check_tokens(shape).to(next(model.parameters()).device))


def _check_tokens(shape: ModelShape) -> Tensor:
    length = min(_CHECK_TOKENS, shape.max_model_len, shape.num_blocks * shape.block_size)
    return (torch.arange(length) * 7907 + 13) % max(shape.vocab_size - 8, 1)


def check_through_pool(runner: WarmRunner, expected: Tensor, name: str) -> None:
    """Run one sequence in chunks through the real pool and compare all its logits with those of `dense_check`.

    Raises `ModelUnsupported` when they differ by more than rounding: then kernels and model don't fit together here.
    """
    shape = runner.shape
    tokens = _check_tokens(shape)
    length = len(tokens)
    table = list(range(-(-length // shape.block_size)))
    cuts = sorted({0, length // 2, length - 1, length})
    parts = []
    for start, end in pairwise(cuts):
        plan = _plan([table], [start], [end - start], tokens[start:end].tolist())
        plan.samples[0] = False
        plan.num_logits[0] = end - start
        parts.append(runner.logits(plan))
    require_equal_logits(name, torch.cat(parts).to(expected.dtype), expected)


def decode_check_plan(shape: ModelShape, num_rows: int) -> StepPlan:
    """A decode step after `check_through_pool`: its sequence's last token, in every row."""
    tokens = _check_tokens(shape).tolist()
    table = list(range(-(-len(tokens) // shape.block_size)))
    plan = _plan([table] * num_rows, [len(tokens) - 1] * num_rows, [1] * num_rows, tokens[-1:] * num_rows)
    return replace(plan, samples=[False] * num_rows)


def peak_plan(shape: ModelShape, scheduler: SchedulerConfig) -> StepPlan:
    """The largest step that the pool and the budgets allow: as many tokens and as many sampling rows as possible."""
    num_rows = max(min(scheduler.max_num_seqs, shape.num_blocks), 1)
    tokens_each = min(scheduler.max_num_batched_tokens // num_rows, shape.max_model_len)
    blocks_each = min(-(-tokens_each // shape.block_size), shape.num_blocks // num_rows)
    tokens_each = min(tokens_each, blocks_each * shape.block_size)
    tables = [list(range(row * blocks_each, (row + 1) * blocks_each)) for row in range(num_rows)]
    plan = _plan(tables, [0] * num_rows, [tokens_each] * num_rows, [0] * (num_rows * tokens_each))
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    plan.joined.extend(JoinedSequence(row, row, sampling, row, 0) for row in range(num_rows))
    return plan


def spare_cuda_bytes(
    build: Callable[[], RunnerT],
    scheduler: SchedulerConfig,
    gpu_memory_utilization: float,
    record: Callable[[RunnerT], None] | None,
) -> int:
    """What the KV cache may take: the utilisation's share of the GPU, less all that is used now, less what the largest
    step takes while it runs, less what recorded steps keep. `build` makes a runner over a pool just large enough for
    that step, `record` makes it record its decode steps."""
    runner = build()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.submit(peak_plan(runner.shape, scheduler)).result()
    torch.cuda.synchronize()
    step_bytes = torch.cuda.max_memory_allocated() - before
    recorded_bytes = 0
    if record is not None:
        before = _free_cuda_bytes()
        record(runner)
        recorded_bytes = before - _free_cuda_bytes()
    runner.close()
    free = _free_cuda_bytes()
    total = torch.cuda.mem_get_info()[1]
    return int(total * gpu_memory_utilization) - (total - free) - step_bytes - max(recorded_bytes, 0)


def _free_cuda_bytes() -> int:
    """Nothing being held back for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _plan(
    tables: Sequence[list[int]], starts: Sequence[int], num_tokens: Sequence[int], token_ids: Sequence[int]
) -> StepPlan:
    rows = list(range(len(tables)))
    return StepPlan(
        step=0,
        seq_ids=rows,
        lanes=list(rows),
        starts=list(starts),
        num_tokens=list(num_tokens),
        block_tables=list(tables),
        samples=[True for _ in rows],
        num_logits=[1 for _ in rows],
        output_index=[0 for _ in rows],
        token_ids=list(token_ids),
    )
