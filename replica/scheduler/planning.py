"""One step, planned.

A sequence is a counter chasing another: tokens whose KV exists, and tokens known. A step spends one token budget on
closing gaps; a token is sampled only where a gap closes. How wide a gap is and why it opened (new prompt, cut prompt,
cache hit, recompute) changes nothing:

    (a) running sequences with a gap of 1 get their token, oldest first
    (b) running sequences with a wider gap, oldest first, share what is left equally; while a waiting request could
        enter, a quarter of what (a) left is kept for it
    (c) waiting requests enter (admission.py), unless somebody was preempted in this step
    (d) what is still left goes to sequences with a wide gap, caps ignored

A running sequence that needs a block when none is free takes one by preemption (preemption.py).
"""

from __future__ import annotations

from itertools import compress
from operator import ge

from replica.scheduler.admission import admit, somebody_could_enter
from replica.scheduler.decode_rows import DecodeRows, by_arrival
from replica.scheduler.plan import PENDING_TOKEN, JoinedSequence, StepPlan
from replica.scheduler.preemption import make_room
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import InFlight, SchedulerState, StepDraft


def plan_step(state: SchedulerState, now_s: float) -> InFlight | None:
    """Plan one step and count it as in flight; None when nothing can be computed now."""
    state.now_s = now_s
    wide_before = [seq for seq in state.prefilling if seq.status is SequenceStatus.RUNNING]
    rows = _decode_rows(state, wide_before)
    draft = StepDraft(state.config.max_num_batched_tokens, len(state.batch.running), rows)
    draft.prefills = sorted([seq for seq in wide_before if seq.gap > 1], key=by_arrival)
    wide = draft.prefills.copy()
    _plan_decodes(state, draft)
    _plan_prefills(state, draft, now_s)
    admit(state, draft, now_s)
    _spend_the_rest(state, draft)
    state.admit_nobody = False
    state.prefilling = list(dict.fromkeys(wide + draft.prefills))  # also those withdrawn, who try again next time
    state.decode_rows = None
    if not draft.decodes and not draft.chunks:
        return None
    if draft.decodes is draft.rows.seqs:
        state.decode_rows = draft.rows
    else:
        draft.rows = DecodeRows(draft.decodes)
    record = _seal(state, draft)
    state.in_flight.append(record)
    _advance(state, draft)
    return record


def _plan_decodes(state: SchedulerState, draft: StepDraft) -> None:
    rows = draft.rows
    draft.decodes = rows.seqs if len(rows.seqs) <= draft.budget else rows.seqs[: draft.budget]  # it was lowered
    draft.budget -= len(draft.decodes)
    due = list(compress(range(len(draft.decodes)), map(ge, rows.starts, rows.plan_due)))
    if not due:
        return
    draft.due = [rows.seqs[row] for row in due]
    needy = [seq for seq in draft.due if seq.num_scheduled >= seq.num_slots]
    if len(needy) <= state.tables.pool.num_free:
        state.tables.grow_each(needy)
    else:
        for seq in needy:
            if seq.status is SequenceStatus.RUNNING and make_room(state, draft, seq):
                state.tables.grow(seq, seq.num_scheduled + 1)
    for row, seq in zip(due, draft.due, strict=True):
        rows.plan_due[row] = seq.plan_due


def _decode_rows(state: SchedulerState, wide_before: list[Sequence]) -> DecodeRows:
    """All running sequences with a gap of 1."""
    left, state.batch.departed = state.batch.departed, set()
    if state.decode_rows is None:
        return DecodeRows([seq for seq in state.batch.running if seq.gap == 1])
    return state.decode_rows.next(left, [seq for seq in wide_before if seq.gap == 1])


def _plan_prefills(state: SchedulerState, draft: StepDraft, now_s: float) -> None:
    prefills = list(draft.prefills)
    if not prefills or draft.budget <= 0:
        return
    kept = draft.budget // 4 if somebody_could_enter(state, draft, now_s) else 0
    for i, seq in enumerate(prefills):
        if seq.status is not SequenceStatus.RUNNING or draft.budget <= kept:
            continue
        share = -(-(draft.budget - kept) // (len(prefills) - i))
        want = min(seq.gap, share, state.config.long_prefill_token_threshold or share)
        if not state.config.enable_chunked_prefill:
            want = seq.gap  # a step that was rolled back left it a whole prompt to compute
        if state.tables.room(seq) > 0 or make_room(state, draft, seq):
            _extend(state, draft, seq, want)


def _spend_the_rest(state: SchedulerState, draft: StepDraft) -> None:
    if draft.budget <= 0:
        return
    for seq in sorted(draft.prefills, key=by_arrival):
        _extend(state, draft, seq, seq.gap - seq.chunk)


def _extend(state: SchedulerState, draft: StepDraft, seq: Sequence, want: int) -> None:
    """Give `want` tokens to the sequence, or as many as fit in free blocks."""
    num_tokens = min(want, draft.budget, state.tables.room(seq))
    if num_tokens < seq.gap and not state.config.enable_chunked_prefill:
        return
    if num_tokens > 0:
        draft.give(seq, num_tokens)
        state.tables.grow(seq, seq.num_scheduled + seq.chunk)


def _seal(state: SchedulerState, draft: StepDraft) -> InFlight:
    """The draft as columns: the decodes' own, then the chunks."""
    rows, chunks, batch = draft.rows, draft.chunks, state.batch
    joined = _join_lanes(state, draft)
    num_recomputed, num_prefill = _count_kinds(draft)
    n = len(rows.seqs)
    samples = [True] * n
    token_ids = rows.token_ids
    if chunks:
        samples += [seq.gap == seq.chunk for seq in chunks]
        token_ids = token_ids.copy()
        for seq in chunks:
            token_ids += seq.tokens[seq.num_scheduled : seq.num_scheduled + seq.chunk]
    state.num_steps += 1
    plan = StepPlan(
        step=state.num_steps,
        seq_ids=rows.seq_ids + [seq.seq_id for seq in chunks] if chunks else rows.seq_ids,
        lanes=rows.lanes + [seq.lane for seq in chunks] if chunks else rows.lanes,
        starts=rows.starts + [seq.num_scheduled for seq in chunks] if chunks else rows.starts,
        num_tokens=[1] * n + [seq.chunk for seq in chunks],
        block_tables=rows.block_tables + [seq.block_table for seq in chunks] if chunks else rows.block_tables,
        samples=samples,
        num_logits=[*map(int, samples)] if chunks else [1] * n,
        output_index=rows.output_index + [seq.num_output_tokens for seq in chunks] if chunks else rows.output_index,
        token_ids=token_ids,
        joined=joined,
        left=batch.left,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=len(token_ids) - num_prefill - num_recomputed,
        num_recomputed_tokens=num_recomputed,
        token_budget=state.config.max_num_batched_tokens,
    )
    batch.left = []
    ends = rows.ends + [seq.num_scheduled + seq.chunk for seq in chunks] if chunks else rows.ends
    admissions = rows.admissions + [seq.admission for seq in chunks] if chunks else rows.admissions
    seqs = rows.seqs + chunks if chunks else rows.seqs
    return InFlight(plan, rows, seqs, ends, admissions, draft.num_running_before, batch.num_departures)


def _join_lanes(state: SchedulerState, draft: StepDraft) -> list[JoinedSequence]:
    joined = []
    decodes = [seq for seq in draft.rows.fresh if not seq.announced]  # a rolled back plan had announced them
    for seq in decodes + [seq for seq in draft.chunks if not seq.announced]:
        if seq.lane < 0:
            state.batch.take_lane(seq)
        seq.announced = True
        joined.append(JoinedSequence(seq.seq_id, seq.lane, seq.request.sampling, seq.seed, seq.num_output_tokens))
    if decodes:
        draft.rows.lanes = [seq.lane for seq in draft.decodes]
    return joined


def _count_kinds(draft: StepDraft) -> tuple[int, int]:
    """Tokens recomputed and tokens of inputs in this step; all others are decode tokens."""
    recomputed = prefill = 0
    for seq in draft.rows.catching_up + draft.chunks:
        start = seq.num_scheduled
        end = start + (seq.chunk or 1)
        again = max(0, min(end, seq.recomputed_until) - start)
        recomputed += again
        prefill += max(0, min(end, seq.input_len) - start - again)
    return recomputed, prefill


def _advance(state: SchedulerState, draft: StepDraft) -> None:
    """Count the planned tokens as scheduled; each row that samples knows one more token, whose value is pending."""
    rows = draft.rows
    for seq, known, end in zip(rows.seqs, rows.known, rows.ends, strict=True):
        seq.num_scheduled = end
        known.append(PENDING_TOKEN)
    for seq in draft.chunks:
        seq.num_scheduled += seq.chunk
        seq.chunk = 0
        if seq.num_scheduled == len(seq.tokens):
            seq.tokens.append(PENDING_TOKEN)
    ending = [s for s in draft.due + draft.chunks if len(s.tokens) >= s.max_len and s.status is SequenceStatus.RUNNING]
    if ending:
        state.batch.begin_ending(ending)
