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
from typing import Literal, NamedTuple

from replica.scheduler.plan import PENDING_TOKEN
from replica.scheduler.sequence import Sequence
from replica.scheduler.state import BlockedBy, SchedulerState, StepDraft

_Blocked = Literal["budget", "seqs", "blocks", "long_prefill", "partial_prefill", "preempted"]
_REASONS: dict[_Blocked, BlockedBy] = {
    "budget": "budget",
    "seqs": "seqs",
    "blocks": "blocks",
    "preempted": "blocks",
    "long_prefill": "long_prefill",
    "partial_prefill": "long_prefill",
}


class Offer(NamedTuple):
    """How a sequence would enter: on these cached blocks, with a first chunk of this many tokens."""

    hits: list[int]
    chunk: int


def admit(state: SchedulerState, draft: StepDraft, now_s: float) -> None:
    """Move waiting sequences into the batch, in order, and give each its first chunk."""
    if state.config.batching == "static" and not len(state.batch) and not state.waiting.returned:
        state.refilling = True
    draft.owed = None  # those mid-prefill have taken blocks since it was asked whether somebody could enter
    while isinstance(entry := _next_entry(state, draft, now_s), tuple):
        _enter(state, draft, *entry, now_s)
    state.blocked_by = None if entry is None else _REASONS[entry]
    state.refilling = state.refilling and state.blocked_by == "budget"


def somebody_could_enter(state: SchedulerState, draft: StepDraft, now_s: float) -> bool:
    """Whether `admit` would let somebody in now: what part of the budget is kept for."""
    return isinstance(_next_entry(state, draft, now_s), tuple)


def _next_entry(state: SchedulerState, draft: StepDraft, now_s: float) -> tuple[Sequence, Offer] | _Blocked | None:
    """Who enters next and how; or what stops all who wait; None when nobody is left to ask.

    A long prompt without a long-prefill slot is parked and may be passed, until it has been overtaken for
    `max_prefill_skip_s`. A head that waits for KV space stops all behind it, but for the bounded bypass.
    """
    queue = state.waiting
    if state.config.batching == "static" and not state.refilling:
        return _member_that_returns(state, draft)
    parked, overdue = queue.first_parked(), queue.first_overdue(now_s - state.config.max_prefill_skip_s)
    while (seq := _earlier(parked, queue.first())) is not None:
        offer = examine(state, draft, seq)
        if isinstance(offer, Offer):
            return seq, offer
        if offer == "long_prefill" and seq is not overdue:
            if seq is parked:
                parked = overdue  # those before that one are no better off, those behind it must not pass
            else:
                queue.park(seq)
            continue
        passing = _small_that_may_pass(state, draft, seq, overdue, now_s) if offer == "blocks" else None
        return passing or offer
    return None


def _member_that_returns(state: SchedulerState, draft: StepDraft) -> tuple[Sequence, Offer] | _Blocked | None:
    """A fixed batch takes back its own preempted members, whoever waits before them, and nobody else."""
    member = min(state.waiting.returned.values(), key=lambda seq: seq.queue_key, default=None)
    if member is None:
        return "seqs" if len(state.waiting) else None
    offer = examine(state, draft, member)
    return (member, offer) if isinstance(offer, Offer) else offer


def examine(state: SchedulerState, draft: StepDraft, seq: Sequence) -> Offer | _Blocked:
    """How `seq` could enter now, or what stops it. Changes nothing."""
    config = state.config
    shrunk = state.admit_nobody and len(state.batch) > 0
    if draft.preempted or shrunk or seq.tokens[-1] == PENDING_TOKEN:
        return "preempted"  # in this step; or a moment ago, and its last token isn't known before the coming commit
    if len(state.batch.running) >= config.max_num_seqs:
        return "seqs"
    if draft.budget <= 0:
        return "budget"
    hits = state.tables.lookup(seq)
    remaining = len(seq.tokens) - len(hits) * state.tables.block_size
    threshold = config.long_prefill_token_threshold or remaining
    if remaining > threshold and not _below(config.max_long_partial_prefills, _num_long(draft, threshold)):
        return "long_prefill"
    chunk = min(remaining, draft.budget, threshold)
    if chunk < remaining and not config.enable_chunked_prefill:
        return "budget"
    if chunk < remaining and not _below(config.max_num_partial_prefills, _num_partial(draft)):
        return "partial_prefill"
    offer = Offer(hits, chunk)
    return offer if _fits(state, draft, seq, offer, remaining) else "blocks"


def _below(limit: int | None, count: int) -> bool:
    return limit is None or count < limit


def _num_long(draft: StepDraft, threshold: int) -> int:
    """Sequences mid-prefill that had more than `threshold` tokens to compute when this step began."""
    return sum(seq.gap > threshold for seq in draft.prefills)


def _num_partial(draft: StepDraft) -> int:
    """Sequences that will still be mid-prefill after this step."""
    return sum(seq.gap > seq.chunk for seq in draft.prefills)


def _earlier(a: Sequence | None, b: Sequence | None) -> Sequence | None:
    if a is None or b is None:
        return a or b
    return a if a.queue_key < b.queue_key else b


def _small_that_may_pass(
    state: SchedulerState, draft: StepDraft, head: Sequence, overdue: Sequence | None, now_s: float
) -> tuple[Sequence, Offer] | None:
    """The next request of at most `kv_bypass_blocks` that may enter past a head that waits for KV space: for
    `kv_bypass_s` after the head was first seen blocked."""
    if head.kv_blocked_since_s is None:
        head.kv_blocked_since_s = now_s
    small = state.waiting.first_small()
    if small is None or head.is_small or now_s - head.kv_blocked_since_s >= state.config.kv_bypass_s:
        return None
    if overdue is not None and _earlier(overdue, small) is overdue:
        return None
    offer = examine(state, draft, small)
    return (small, offer) if isinstance(offer, Offer) else None


def _fits(state: SchedulerState, draft: StepDraft, seq: Sequence, offer: Offer, remaining: int) -> bool:
    tables, running = state.tables, state.batch.running
    reserve_full = state.config.scheduler_reserve_full_isl
    whole = reserve_full or seq.num_preemptions > 0
    upto = len(seq.tokens) if whole else len(seq.tokens) - remaining + offer.chunk
    need = tables.blocks_for(upto) - len(offer.hits) + tables.num_unheld(offer.hits)
    need += seq.num_preemptions > 0 and bool(running)
    spare = tables.pool.num_free - need
    if reserve_full:
        if draft.owed is None:
            draft.owed = sum(_still_to_take(state, prefill) for prefill in draft.prefills)
        spare -= draft.owed
    if running:
        spare -= ceil(state.config.watermark * tables.pool.num_blocks)
    if spare < 0 or not running:
        return spare >= 0
    per_step = max(1, state.config.max_num_batched_tokens - len(draft.decodes))
    per_step = min(per_step, state.config.long_prefill_token_threshold or per_step)
    num_steps = -(-remaining // per_step)
    if spare >= len(draft.decodes) * (tables.blocks_for(num_steps) + 1):
        return True  # more than any growth: spares the sum over all decodes
    return spare >= _growth(state, draft, num_steps)


def _still_to_take(state: SchedulerState, seq: Sequence) -> int:
    return max(0, state.tables.blocks_for(len(seq.tokens)) - len(seq.block_table))


def _growth(state: SchedulerState, draft: StepDraft, num_steps: int) -> int:
    """Blocks that running decodes take in the next `num_steps` steps; a sequence's last token needs no slot."""
    if num_steps not in draft.growth:
        size = state.tables.block_size
        draft.growth[num_steps] = sum(
            max(0, -(-min(len(seq.tokens) + num_steps, seq.max_len - 1) // size) - len(seq.block_table))
            for seq in draft.decodes
        )
    return draft.growth[num_steps]


def _enter(state: SchedulerState, draft: StepDraft, seq: Sequence, offer: Offer, now_s: float) -> None:
    state.waiting.remove(seq)
    state.waiting.note_overtaken(seq, now_s)
    seq.own_tokens()
    seq.aged_priority = seq.request.priority - (now_s - seq.queued_at_s) / state.config.priority_ageing_s
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
    if draft.owed is not None:
        draft.owed += _still_to_take(state, seq)
