"""After a step: advance, name full blocks, append tokens, end what has ended; or undo a step that never happened."""

from __future__ import annotations

from collections.abc import Sequence as Columns

from replica.request import FinishReason
from replica.scheduler.plan import PENDING_TOKEN, StepOutcome, StepResult
from replica.scheduler.preemption import return_to_queue
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import InFlight, SchedulerState

_End = tuple[FinishReason, int | None, str | None]


def commit_step(state: SchedulerState, record: InFlight, result: StepResult, now_s: float) -> StepOutcome:
    """Apply a step's result. Rows of sequences that ended meanwhile change nothing; a row of a sequence that was
    preempted meanwhile still delivers its token, but no KV.

    Most decode rows only count and append; those are done first, in a loop that does no more.
    """
    state.now_s = now_s
    plan, rows, tokens = record.plan, record.decodes, result.token_ids
    assert len(tokens) == len(plan), "a result has one token for each row of its plan"
    ends: dict[int, _End] = {}
    silent: set[int] = set()
    for row in range(len(plan)) if result.failed_rows else _commit_plain_decodes(state, record, tokens):
        seq = record.seqs[row]
        if seq.status is SequenceStatus.ENDED:
            silent.add(row)
        elif row in result.failed_rows or (plan.samples[row] and tokens[row] < 0):
            ends[row] = (FinishReason.ERROR, None, result.failed_rows.get(row, "step_failed"))
            state.tables.distrust(seq)
        else:
            _commit_kv(state, record, row)
            if not plan.samples[row]:
                silent.add(row)
                continue
            position, token = record.ends[row], tokens[row]
            seq.tokens[position] = token
            if position == seq.input_len:
                seq.first_token_at_s = now_s
            if (end_of := _end_of(seq, position, token)) is not None:
                ends[row] = end_of
    rows.sampled = tokens if len(rows.seqs) == len(tokens) else tokens[: len(rows.seqs)]
    if ends:
        end_sequences(state, [record.seqs[row] for row in ends], now_s)
    return _outcome(record, tokens, ends, silent)


def _commit_plain_decodes(state: SchedulerState, record: InFlight, tokens: list[int]) -> list[int]:
    """Commit the rows whose sequence is still in the same stay, fills no block and doesn't end. Returns the others."""
    rows, others = record.decodes, []
    departed = state.batch.num_departures != record.num_departures
    columns = zip(
        rows.seqs, rows.known, rows.ends, rows.commit_due, rows.stop_ids, rows.admissions, tokens, strict=False
    )
    for row, (seq, known, end, due, stop_ids, admission, token) in enumerate(columns):
        if end >= due or token in stop_ids or token < 0 or (departed and seq.admission != admission):
            others.append(row)
        else:
            seq.num_computed = end
            known[end] = token
    others += range(len(rows.seqs), len(record.seqs))
    return others


def _commit_kv(state: SchedulerState, record: InFlight, row: int) -> None:
    seq, end = record.seqs[row], record.ends[row]
    if seq.admission == record.admissions[row]:
        seq.num_computed = end
        state.tables.register_computed(seq)
        if row < len(record.decodes.seqs):
            record.decodes.commit_due[row] = seq.commit_due
        if (newest := state.decode_rows) is not None and newest is not record.decodes:
            newest.look_again(seq)
    else:
        seq.lost(end)


def _end_of(seq: Sequence, position: int, token: int) -> _End | None:
    """Whether the token at this position ends the sequence. A stop wins over length."""
    if token in seq.stop_ids and position >= seq.stop_from:
        named = token in seq.request.sampling.stop_token_ids
        return FinishReason.STOP, token if named else None, None
    if position + 1 >= seq.max_len:
        return FinishReason.LENGTH, None, None
    return None


def _outcome(record: InFlight, tokens: list[int], ends: dict[int, _End], silent: set[int]) -> StepOutcome:
    rows: Columns[int] = range(len(record.seqs))
    seq_ids = record.plan.seq_ids
    if silent:
        rows = [row for row in rows if row not in silent]
        seq_ids = [seq_ids[row] for row in rows]
        tokens = [tokens[row] for row in rows]
    if not ends:
        none = [None] * len(rows)
        return StepOutcome(seq_ids, tokens, list(none), list(none), list(none))
    still = (None, None, None)
    reasons = [ends.get(row, still) for row in rows]
    tokens = [
        PENDING_TOKEN if reason is FinishReason.ERROR else token
        for token, (reason, _, _) in zip(tokens, reasons, strict=True)
    ]
    return StepOutcome(seq_ids, tokens, [r[0] for r in reasons], [r[1] for r in reasons], [r[2] for r in reasons])


def end_sequences(state: SchedulerState, seqs: list[Sequence], now_s: float | None) -> None:
    """The only exit: every sequence that ends, however it ends, gives everything back here."""
    for seq in seqs:
        if seq.status is SequenceStatus.WAITING:
            state.waiting.remove(seq)
        else:
            state.tables.release(seq)
    state.batch.remove([seq for seq in seqs if seq.status is not SequenceStatus.WAITING])
    for seq in seqs:
        seq.status = SequenceStatus.ENDED
        seq.finished_at_s = now_s
        state.ended[seq.seq_id] = state.live.pop(seq.seq_id)


def roll_back_step(state: SchedulerState, record: InFlight) -> None:
    """The newest plan in flight was not computed: forget its pending tokens and count its chunks as gaps again.

    Sequences that it let in keep place and blocks, except where a later plan had filled the place of a sequence that
    this one was to end and that runs on now: then the newest admissions go back to the queue.
    """
    plan = record.plan
    state.decode_rows = None
    state.batch.left = plan.left + [lane for lane in state.batch.left if lane not in plan.left]
    for seq in state.batch.ending.values():
        if seq.lane in plan.left:
            seq.announced = False  # the model may have dropped its lane already
    for row, seq in enumerate(record.seqs):
        if seq.status is SequenceStatus.ENDED:
            continue
        if plan.samples[row]:
            del seq.tokens[record.ends[row] :]
        if seq.admission == record.admissions[row]:
            seq.num_scheduled = plan.starts[row]
            if seq.status is SequenceStatus.ENDING:
                state.batch.revive(seq)
    for joined in plan.joined:
        seq_or_none = state.live.get(joined.seq_id)
        if seq_or_none is not None:
            seq_or_none.announced = False
    state.prefilling = [seq for seq in state.batch.running if seq.gap > 1]
    num_places = max(state.config.max_num_seqs, record.num_running_before)
    while len(state.batch.running) > num_places:
        return_to_queue(state, max(state.batch.running, key=lambda seq: seq.admission))
