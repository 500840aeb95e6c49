"""What must hold between any two calls. Slow on purpose: for tests, and for a live replica under suspicion."""

from __future__ import annotations

from replica.scheduler.plan import PENDING_TOKEN
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import SchedulerState


def check(state: SchedulerState) -> None:
    """Raises AssertionError naming what is broken."""
    tables = state.tables
    holders = [*state.batch.running, *state.batch.ending.values()]
    waiting = [*state.waiting.fresh.values(), *state.waiting.returned.values()]
    tables.pool.check([seq.block_table for seq in holders])
    if tables.cache is not None:
        tables.cache.check()
    state.batch.check()
    assert {seq.seq_id for seq in holders + waiting} == set(state.live), "a live sequence is lost"
    assert len(holders) + len(waiting) == len(state.live), "a sequence is in two places"
    for seq in holders:
        _check_holder(state, seq)
    for seq in waiting:
        assert seq.status is SequenceStatus.WAITING, "a waiting sequence has another status"
        assert seq.num_scheduled == seq.num_computed == len(seq.block_table) == 0, "a waiting sequence holds blocks"
        assert seq.admission == 0 and seq.lane < 0, "a waiting sequence has a place"
    state.waiting.check()
    for record in state.in_flight:
        assert sum(record.plan.num_tokens) == len(record.plan.token_ids), "columns of a plan disagree"


def _check_holder(state: SchedulerState, seq: Sequence) -> None:
    assert 0 <= seq.num_computed <= seq.num_scheduled <= len(seq.tokens), "computed, scheduled, known out of order"
    assert len(seq.tokens) <= seq.max_len, "a sequence outgrew its limit"
    assert seq.num_slots == len(seq.block_table) * state.tables.block_size >= seq.num_scheduled, "KV without a slot"
    assert seq.chunk == 0, "a chunk was left over"
    num_pending = seq.tokens.count(PENDING_TOKEN)
    assert all(token == PENDING_TOKEN for token in seq.tokens[len(seq.tokens) - num_pending :]), "a hole in the tokens"
    assert num_pending <= len(state.in_flight), "a token is pending in no plan"
    if seq.status is SequenceStatus.RUNNING:
        assert seq.gap >= 1, "a running sequence has nothing to compute"
