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

from operator import attrgetter

from replica.scheduler.admission import admit, somebody_could_enter
from replica.scheduler.plan import PENDING_TOKEN, JoinedSequence, StepPlan
from replica.scheduler.preemption import make_room
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import InFlight, SchedulerState, StepDraft


def plan_step(state: SchedulerState, now_s: float) -> InFlight | None:
    """Plan one step and count it as in flight; None when nothing can be computed now."""
    state.now_s = now_s
    draft = StepDraft(state.config.max_num_batched_tokens, len(state.batch.running))
    _plan_decodes(state, draft)
    _plan_prefills(state, draft, now_s)
    admit(state, draft, now_s)
    _spend_the_rest(state, draft)
    state.admit_nobody = False
    state.prefilling = draft.prefills
    if not draft.decodes and not draft.chunks:
        return None
    record = _seal(state, draft)
    state.in_flight.append(record)
    state.last_sealed = record
    _advance(state, draft, record.ends)
    return record


def _plan_decodes(state: SchedulerState, draft: StepDraft) -> None:
    running = state.batch.running
    wide = {seq for seq in state.prefilling if seq.status is SequenceStatus.RUNNING and seq.gap > 1}
    draft.prefills = sorted(wide, key=attrgetter("arrival"))
    draft.decodes = [seq for seq in running if seq not in wide] if wide else running.copy()
    del draft.decodes[draft.budget :]  # only after a budget was lowered below what was running
    draft.budget -= len(draft.decodes)
    draft.due = [seq for seq in draft.decodes if seq.num_scheduled >= seq.plan_due]
    for seq in draft.due:
        if seq.num_scheduled < seq.num_slots or seq.status is not SequenceStatus.RUNNING:
            continue
        if make_room(state, draft, seq):
            state.tables.grow(seq, seq.num_scheduled + 1)


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
    for seq in sorted(draft.prefills, key=attrgetter("arrival")):
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
    """The draft as columns. The columns that name rows are the last plan's own lists while the batch is the same: in a
    long run of decodes nothing about them changes."""
    decodes, chunks, batch, last = draft.decodes, draft.chunks, state.batch, state.last_sealed
    rows = decodes + chunks
    same = last is not None and last.batch_version == batch.version and last.seqs == rows
    joined = [] if same else _join_lanes(state, rows)
    starts = last.ends if last and same else [seq.num_scheduled for seq in rows]
    ends = [start + 1 for start in starts]
    num_tokens = [1] * len(decodes)
    samples = [True] * len(decodes)
    token_ids = [seq.tokens[-1] for seq in decodes]
    for row, seq in enumerate(chunks, start=len(decodes)):
        ends[row] = starts[row] + seq.chunk
        num_tokens.append(seq.chunk)
        samples.append(seq.gap == seq.chunk)
        token_ids += seq.tokens[starts[row] : ends[row]]
    num_recomputed, num_prefill = _count_kinds(draft)
    state.num_steps += 1
    plan = StepPlan(
        step=state.num_steps,
        seq_ids=last.plan.seq_ids if last and same else [seq.seq_id for seq in rows],
        lanes=last.plan.lanes if last and same else [seq.lane for seq in rows],
        starts=starts,
        num_tokens=num_tokens,
        block_tables=last.plan.block_tables if last and same else [seq.block_table for seq in rows],
        samples=samples,
        num_logits=[*map(int, samples)] if chunks else num_tokens,
        output_index=[len(seq.tokens) - seq.prompt_len for seq in rows],
        token_ids=token_ids,
        joined=joined,
        left=batch.left,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=len(token_ids) - num_prefill - num_recomputed,
        num_recomputed_tokens=num_recomputed,
    )
    batch.left = []
    admissions = last.admissions if last and same else [seq.admission for seq in rows]
    return InFlight(plan, rows, len(decodes), ends, admissions, draft.num_running_before, batch.version)


def _join_lanes(state: SchedulerState, rows: list[Sequence]) -> list[JoinedSequence]:
    joined = []
    for seq in [seq for seq in rows if not seq.announced]:
        if seq.lane < 0:
            state.batch.take_lane(seq)
        seq.announced = True
        joined.append(JoinedSequence(seq.seq_id, seq.lane, seq.request.sampling, seq.seed, seq.num_output_tokens))
    return joined


def _count_kinds(draft: StepDraft) -> tuple[int, int]:
    """Tokens recomputed and tokens of inputs in this step; all others are decode tokens."""
    catching_up = [seq for seq in draft.decodes if seq.num_scheduled < seq.caught_up_at]
    recomputed = prefill = 0
    for seq in catching_up + draft.chunks:
        start = seq.num_scheduled
        end = start + (seq.chunk or 1)
        again = max(0, min(end, seq.recomputed_until) - start)
        recomputed += again
        prefill += max(0, min(end, seq.input_len) - start - again)
    return recomputed, prefill


def _advance(state: SchedulerState, draft: StepDraft, ends: list[int]) -> None:
    """Count the planned tokens as scheduled; each row that samples knows one more token, whose value is pending."""
    for seq, end in zip(draft.decodes, ends, strict=False):
        seq.num_scheduled = end
        seq.tokens.append(PENDING_TOKEN)
    ending = [seq for seq in draft.due if seq.status is SequenceStatus.RUNNING and len(seq.tokens) >= seq.max_len]
    for seq in draft.chunks:
        seq.num_scheduled += seq.chunk
        seq.chunk = 0
        if seq.num_scheduled == len(seq.tokens):
            seq.tokens.append(PENDING_TOKEN)
            if len(seq.tokens) >= seq.max_len:
                ending.append(seq)
    if ending:
        state.batch.begin_ending(ending)
