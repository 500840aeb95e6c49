"""Batch-invariant steps: every forward has the same shape, so that a token's numbers depend on its own context only.

Kernels pick their way of summing by the shape of their input, so a token's logits change in the last bits with the
number of rows beside it. With `batch_invariant` a step runs as a series of forwards of exactly `TILE` tokens, each
token a row of its own, the last tile padded with rows that write into a spare block. Within a tile K and V are written
before anything attends, and tiles run in order, so a chunk cut by tiles sees its own earlier part. Together with the
attention of `attention/tiles.py` this makes answers strictly equal alone, batched, chunked, after a prefix hit and
after a preemption. The price is speed: a step never costs less than a full tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replica.errors import ModelUnsupported
from replica.model.api import ModelShape
from replica.scheduler.plan import StepPlan

# A multiple of 32, so that element-wise kernels have no remainder that another code path computes.
TILE = 32


def tile_plans(plan: StepPlan, spare_block: int) -> list[StepPlan]:
    """The same work as steps of `TILE` rows with one token each. They share the plan's step number."""
    rows = [(row, place) for row, count in enumerate(plan.num_tokens) for place in range(count)]
    return [_tile(plan, rows[first : first + TILE], first, spare_block) for first in range(0, len(rows), TILE)]


def _tile(plan: StepPlan, tokens: list[tuple[int, int]], first: int, spare_block: int) -> StepPlan:
    padding = TILE - len(tokens)
    zeros, ones = [0] * padding, [1] * TILE
    return StepPlan(
        step=plan.step,
        seq_ids=[plan.seq_ids[row] for row, _ in tokens] + zeros,
        lanes=[plan.lanes[row] for row, _ in tokens] + zeros,
        starts=[plan.starts[row] + place for row, place in tokens] + zeros,
        num_tokens=ones,
        block_tables=[plan.block_tables[row] for row, _ in tokens] + [[spare_block]] * padding,
        samples=[False] * TILE,
        num_logits=[int(place >= plan.num_tokens[row] - plan.num_logits[row]) for row, place in tokens] + zeros,
        output_index=[plan.output_index[row] for row, _ in tokens] + zeros,
        token_ids=plan.token_ids[first : first + len(tokens)] + zeros,
    )


def require_dense_layers(model: PreTrainedModel) -> None:
    """Routed experts see as many rows as the step happens to send them: no fixed shape can be kept."""
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ModelUnsupported(
            f"{model.config.model_type} routes tokens to experts, so it can't be batch-invariant; "
            "leave --batch-invariant off"
        )


def require_invariance(name: str, logits: Callable[[StepPlan], Tensor], shape: ModelShape) -> None:
    """Run one token at every place of a tile, among different neighbours: its logits must not differ in one bit.

    The token stands in its third block, at two places at a time; its neighbours' contexts grow from tile to tile, from
    nothing to four blocks. They lie in the spare block and, where a block is full, in the token's own first two. Raises
    `ModelUnsupported` when the logits differ: then the kernels of this machine can't promise it.
    """
    generator = torch.Generator().manual_seed(1)
    size, spare = shape.block_size, shape.num_blocks
    start = min(2 * size + size // 2, shape.num_blocks * size - 1, shape.max_model_len - 1)
    mine = list(range(start // size + 1))
    filled = ((start, mine), (min(size, shape.max_model_len), [spare]))
    logits(_contexts([(count, table) for count, table in filled if count], shape.vocab_size, generator))
    shared, most = [*mine[:2], spare, spare], min(4 * size, shape.max_model_len) - 1
    wanted: Tensor | None = None
    for place in range(TILE // 2):
        longest = most * place // (TILE // 2 - 1)
        starts = torch.randint(longest // 2, longest + 1, (TILE,), generator=generator).tolist()
        tables = [[*shared[: at // size], spare] for at in starts]
        token_ids = _random_tokens(TILE, shape.vocab_size, generator)
        places = [place, place + TILE // 2]
        for one in places:
            starts[one], tables[one], token_ids[one] = start, mine, 1
        found = logits(_step(starts, tables, [1] * TILE, token_ids, num_logits=1))[places]
        wanted = found[:1] if wanted is None else wanted
        if not torch.equal(found, wanted.expand_as(found)):
            raise ModelUnsupported(
                f"{name} can't be batch-invariant on this machine: a token's logits change with its place in the step; "
                "set --num-threads 1 or leave --batch-invariant off"
            )


def _contexts(rows: list[tuple[int, list[int]]], vocab_size: int, generator: torch.Generator) -> StepPlan:
    """Random sequences from their beginnings on: how many tokens, and their blocks."""
    counts, tables = [count for count, _ in rows], [table for _, table in rows]
    return _step([0] * len(rows), tables, counts, _random_tokens(sum(counts), vocab_size, generator), num_logits=0)


def _random_tokens(count: int, vocab_size: int, generator: torch.Generator) -> list[int]:
    found: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return found


def _step(
    starts: list[int], tables: list[list[int]], counts: list[int], token_ids: list[int], num_logits: int
) -> StepPlan:
    """A step of rows that sample nothing."""
    nothing = [0] * len(starts)
    return StepPlan(
        step=0,
        seq_ids=list(range(len(starts))),
        lanes=nothing,
        starts=starts,
        num_tokens=counts,
        block_tables=tables,
        samples=[False] * len(starts),
        num_logits=[num_logits] * len(starts),
        output_index=nothing,
        token_ids=token_ids,
    )
