"""Ways to choose a victim. Each gets those who may lose (never none, newest arrival first) and picks one.

What a preemption costs is what must be computed again: all that the victim had computed, but for the leading blocks
that the prefix cache still has when it returns. Blocks that others hold stay for certain; the rest stays only while
nobody takes it. What it gains is the victim's blocks that nobody else holds.
"""

from __future__ import annotations

from itertools import takewhile

from replica.scheduler.block_pool import BlockPool
from replica.scheduler.preemption import newest
from replica.scheduler.sequence import Sequence
from replica.scheduler.state import VictimRule

Candidates = list[Sequence]


def fewest_computed(candidates: Candidates, pool: BlockPool) -> Sequence:  # noqa: ARG001
    """The one with the fewest computed tokens."""
    return min(candidates, key=lambda seq: seq.num_computed)


def least_recompute(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The fewest computed tokens, less those in leading blocks that another sequence holds too."""
    return min(candidates, key=lambda seq: _to_recompute(seq, pool))


def least_recompute_per_block(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The fewest tokens to compute again for each block that becomes free."""
    return min(candidates, key=lambda seq: _to_recompute(seq, pool) / max(1, _num_freed(seq, pool)))


def most_blocks(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The one that frees the most blocks: the fewest preemptions."""
    return max(candidates, key=lambda seq: _num_freed(seq, pool))


def newest_mid_prefill(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The newest with more than one token to compute, whose computed blocks are in the prefix cache; else the newest.

    No stream that flows stops: the victim's hasn't begun, or stands still already (preempted before), and then for
    longer. What it had computed is found again in the prefix cache if it returns soon.
    """
    for seq in candidates:
        if seq.gap > 1 and seq.block_table and pool.is_named(seq.block_table[0]):
            return seq
    return newest(candidates, pool)


def newest_any_mid_prefill(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The newest that still computes its input, cached or not; else the newest."""
    return next((seq for seq in candidates if seq.gap > 1), newest(candidates, pool))


def newest_with_blocks(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The newest that frees at least 16 blocks, so that one preemption lasts a while; else the newest."""
    return next((seq for seq in candidates if _num_freed(seq, pool) >= 16), newest(candidates, pool))


def newest_little_progress(candidates: Candidates, pool: BlockPool) -> Sequence:
    """The newest with fewer than 32 output tokens; else the newest."""
    return next((seq for seq in candidates if seq.num_output_tokens < 32), newest(candidates, pool))


def last_admitted(candidates: Candidates, pool: BlockPool) -> Sequence:  # noqa: ARG001
    """The one that took its place last, whenever it arrived."""
    return max(candidates, key=lambda seq: seq.admission)


def farthest_from_end(candidates: Candidates, pool: BlockPool) -> Sequence:  # noqa: ARG001
    """The one with the most tokens still to make: those about to end are spared. It knows what no live scheduler does:
    where an answer will end."""
    return max(candidates, key=lambda seq: seq.max_len - len(seq.tokens))


def second_oldest(candidates: Candidates, pool: BlockPool) -> Sequence:  # noqa: ARG001
    """The oldest that may lose: the other extreme."""
    return candidates[-1]


RULES: dict[str, VictimRule] = {
    rule.__name__.replace("_", "-"): rule
    for rule in (
        newest,
        newest_mid_prefill,
        newest_any_mid_prefill,
        last_admitted,
        newest_with_blocks,
        newest_little_progress,
        fewest_computed,
        least_recompute,
        least_recompute_per_block,
        most_blocks,
        farthest_from_end,
        second_oldest,
    )
}


def _to_recompute(seq: Sequence, pool: BlockPool) -> int:
    """Tokens beyond the leading blocks that others hold; these are full."""
    table = seq.block_table
    num_kept = len(list(takewhile(lambda block: pool.ref_count(block) > 1, table)))
    return seq.num_computed - (num_kept * seq.num_slots // len(table) if num_kept else 0)


def _num_freed(seq: Sequence, pool: BlockPool) -> int:
    return sum(pool.ref_count(block) == 1 for block in seq.block_table)
