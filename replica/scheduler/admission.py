"""Who may leave the waiting queue in this step.

Heads of the queue enter in order while places, tokens and blocks last. A head enters when

    need + reserve + growth <= free - owed

need     blocks of its whole input (or only of its chunk, without `scheduler_reserve_full_isl`), less the cached
         blocks that somebody holds; cached blocks that nobody holds count, since taking them shrinks the free list.
         After a preemption: of its whole known context, and one more while anything else runs
reserve  the watermark
growth   what running decodes will need until this input is computed
owed     what sequences already mid-prefill still have to take (with `scheduler_reserve_full_isl` only), so that two
         long prompts can't both pass on the same free blocks

When nothing runs, reserve and growth are 0: whatever fits alone enters.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from replica.scheduler.plan import PENDING_TOKEN
from replica.scheduler.sequence import Sequence
from replica.scheduler.state import BlockedBy, SchedulerState, StepDraft


class Offer(NamedTuple):
    """How a sequence would enter: on these cached blocks, with a first chunk of this many tokens."""

    hits: list[int]
    chunk: int


def admit(state: SchedulerState, draft: StepDraft, now_s: float) -> None:
    """Move heads of the queue into the batch and give them their first chunk."""
    state.blocked_by = None
    while (head := state.waiting.head()) is not None:
        offer = examine(state, draft, head)
        if not isinstance(offer, Offer):
            state.blocked_by = offer
            return
        state.waiting.remove(head)
        _enter(state, draft, head, offer, now_s)


def examine(state: SchedulerState, draft: StepDraft, seq: Sequence) -> Offer | BlockedBy:
    """How `seq` could enter now, or what stops it. Changes nothing."""
    if draft.preempted or state.admit_nobody:
        return "blocks"
    if len(state.batch.running) >= state.config.max_num_seqs:
        return "seqs"
    if draft.budget <= 0:
        return "budget"
    if seq.tokens[-1] == PENDING_TOKEN:
        return "blocks"  # preempted a moment ago: its last token isn't known before the coming commit
    hits = state.tables.lookup(seq)
    num_hit_tokens = len(hits) * state.tables.block_size
    remaining = len(seq.tokens) - num_hit_tokens
    offer = Offer(hits, min(remaining, draft.budget))
    if not _fits(state, draft, seq, offer, remaining):
        return "blocks"
    return offer


def _fits(state: SchedulerState, draft: StepDraft, seq: Sequence, offer: Offer, remaining: int) -> bool:
    tables, running = state.tables, state.batch.running
    reserve_full = state.config.scheduler_reserve_full_isl
    whole = reserve_full or seq.num_preemptions > 0
    upto = len(seq.tokens) if whole else len(seq.tokens) - remaining + offer.chunk
    need = tables.blocks_for(upto) - len(offer.hits) + tables.num_unheld(offer.hits)
    need += seq.num_preemptions > 0 and bool(running)
    spare = tables.pool.num_free - need
    if reserve_full:
        spare -= sum(tables.blocks_for(len(s.tokens)) - len(s.block_table) for s in draft.prefills)
    if running:
        spare -= ceil(state.config.watermark * tables.pool.num_blocks)
    if spare < 0 or not running:
        return spare >= 0
    per_step = max(1, state.config.max_num_batched_tokens - len(draft.decodes))
    num_steps = -(-remaining // per_step)
    if spare >= len(draft.decodes) * (tables.blocks_for(num_steps) + 1):
        return True  # more than any growth: spares the sum over all decodes
    return spare >= sum(_growth(state, decode, num_steps) for decode in draft.decodes)


def _growth(state: SchedulerState, decode: Sequence, num_steps: int) -> int:
    """Blocks that a running decode takes in the next `num_steps` steps; its last token needs no slot."""
    upto = min(len(decode.tokens) + num_steps, decode.max_len - 1)
    return max(0, state.tables.blocks_for(upto) - len(decode.block_table))


def _enter(state: SchedulerState, draft: StepDraft, seq: Sequence, offer: Offer, now_s: float) -> None:
    state.tables.adopt(seq, offer.hits)
    state.batch.join(seq)
    if seq.scheduled_at_s is None:
        seq.scheduled_at_s = now_s
        seq.num_cached_tokens = seq.num_computed
        if state.tables.cache is not None:
            state.tally.prefix_query_tokens += len(seq.tokens)
            state.tally.prefix_hit_tokens += seq.num_computed
    state.tables.grow(seq, seq.num_scheduled + offer.chunk)
    draft.prefills.append(seq)
    draft.give(seq, offer.chunk)
