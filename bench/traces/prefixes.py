"""Which leading blocks of a prompt others have too. A prompt's later blocks are its own and have no name.

Conversations: a request repeats the beginning of an earlier one (its donor): how much of its own length, and how many
requests ago, are drawn from quantile grids. What it repeats and what is repeated of it share block ids; so the hit
rate of an unbounded cache follows from the first grid, and how much of it a small cache keeps from the second.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from bench.traces.lengths import Counts

Blocks = tuple["array[int]", ...]

_SEARCH = 48


def conversations(
    prompts: Counts,
    block_tokens: int,
    shares: NDArray[np.float64],
    ages: Counts,
    rng: np.random.Generator,
    *,
    common: bool,
    again: float,
) -> Blocks:
    """Prompt i repeats `shares[i]` of its blocks from a prompt about `ages[i]` requests ago (only whole blocks: the
    last, half-filled one counts in the share but never repeats).

    `common`: every prompt begins with the same block. `again`: how often a prompt that was repeated stays open to be
    repeated once more; else its conversation goes on only from the prompt that repeated it.
    """
    num_blocks = prompts // block_tokens
    wanted_blocks = np.minimum(np.rint(shares * -(-prompts // block_tokens)), num_blocks)
    wanted = wanted_blocks.astype(np.int64).tolist()
    blocks = num_blocks.tolist()
    open_blocks = list(blocks)  # 0: its conversation goes on elsewhere
    closes = (rng.random(len(blocks)) >= again).tolist()
    donors = [-1] * len(blocks)
    repeated = [0] * len(blocks)
    shown = [0] * len(blocks)  # leading blocks that somebody else has too
    for i, age in enumerate(ages.tolist()):
        depth = wanted[i]
        if i and depth > common:
            place = i - age if age <= i else age % i  # a short trace repeats what it has
            donors[i] = donor = _near(open_blocks, place, i, depth)
            depth = min(depth, blocks[donor])
            shown[donor] = max(shown[donor], depth)
            if closes[i]:
                open_blocks[donor] = 0
        elif depth and not common:
            depth = 0
        repeated[i] = depth if donors[i] >= 0 or not common else min(1, blocks[i])
        shown[i] = max(repeated[i], 1) if common and blocks[i] else repeated[i]
    return _named(donors, repeated, shown, common)


def groups(num_requests: int, rng: np.random.Generator, *, num_groups: int, num_blocks: int) -> Blocks:
    """Each request has one of `num_groups` prefixes of `num_blocks` blocks, all equally often, in random order."""
    tables = [array("q", range(g * num_blocks, (g + 1) * num_blocks)) for g in range(num_groups)]
    members = rng.permutation(np.arange(num_requests) % num_groups)
    return tuple(tables[g] for g in members.tolist())


def _near(open_blocks: list[int], place: int, end: int, depth: int) -> int:
    """The request nearest to `place`, before `end`, with at least `depth` open blocks; failing that the one with the
    most in the neighbourhood."""
    best = place
    for step in range(_SEARCH):
        for j in (place - step, place + step):
            if 0 <= j < end:
                if open_blocks[j] >= depth:
                    return j
                if open_blocks[j] > open_blocks[best]:
                    best = j
    return best


def _named(donors: list[int], repeated: list[int], shown: list[int], common: bool) -> Blocks:
    next_id = 1
    tables: list[array[int]] = []
    for donor, depth, upto in zip(donors, repeated, shown, strict=True):
        table: array[int] = tables[donor][:depth] if donor >= 0 else array("q")
        if common and upto and not table:
            table.append(0)
        num_new = upto - len(table)
        table.extend(range(next_id, next_id + num_new))
        next_id += num_new
        tables.append(table)
    return tuple(tables)
