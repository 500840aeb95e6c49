"""What must hold between any two calls: for tests, and by a setting for a live replica under suspicion.

A check looks at every block and every sequence once. Measured with contexts of 1,000 tokens in blocks of 16 and the
prefix cache on, against one plan and commit of the same scheduler (`bench/scheduler_speed` has these for shorter
contexts), in milliseconds on one core of a server CPU:

    running decodes   blocks    a check   plan + commit
                 16    1,100       0.3             0.05
                256   18,000       4               0.23
              1,024   72,000      17               1.0

With `check_invariants` a step has two checks, so that a replica's step with 256 decodes takes 8 ms longer.
"""

from __future__ import annotations

from replica.scheduler.plan import PENDING_TOKEN
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import SchedulerState


class InvariantBroken(AssertionError):
    """The scheduler's state contradicts itself, and no result of it can be trusted any more: the engine must stop."""


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
    in_sight = {*state.prefilling, *(seq for seq in state.batch.running if seq.gap == 1)}
    if (rows := state.decode_rows) is not None:
        rows.check(state.batch.departed)
        in_sight = {*state.prefilling, *rows.seqs}
    assert in_sight.issuperset(state.batch.running), "a running sequence is in no plan's sight"
    for record in state.in_flight:
        assert sum(record.plan.num_tokens) == len(record.plan.token_ids), "columns of a plan disagree"


def _check_holder(state: SchedulerState, seq: Sequence) -> None:
    assert 0 <= seq.num_computed <= seq.num_scheduled <= len(seq.tokens), "computed, scheduled, known out of order"
    assert len(seq.tokens) <= seq.max_len, "a sequence outgrew its limit"
    assert seq.num_slots == len(seq.block_table) * state.tables.block_size >= seq.num_scheduled, "KV without a slot"
    assert seq.chunk == 0, "a chunk was left over"
    coming = seq.tokens[seq.num_computed :]
    num_pending = coming.count(PENDING_TOKEN)
    assert coming[len(coming) - num_pending :].count(PENDING_TOKEN) == num_pending, "a hole in the tokens"
    assert num_pending <= len(state.in_flight), "a token is pending in no plan"
    if seq.status is SequenceStatus.RUNNING:
        assert seq.gap >= 1, "a running sequence has nothing to compute"
