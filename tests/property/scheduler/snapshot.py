"""A whole world as bytes and back, and the part of it that decides how it goes on.

`freeze` pickles; objects that never change (requests, settings, shapes) are kept once and referred to, which makes it
three times faster. `state_key` names a world up to what can't matter any more: numbers of blocks and steps, the
history, and how often somebody was preempted beyond what spares a victim.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.decode_rows import DecodeRows
from replica.scheduler.plan import StepPlan, StepResult
from replica.scheduler.preemption import SPARED_AFTER
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import InFlight, SchedulerState
from tests.property.scheduler.ledger import Book
from tests.property.scheduler.world import World

_UNCHANGING_TYPES = (SchedulerConfig, ModelShape, GenerationRequest, SamplingParams, SequenceStatus, FinishReason)
_unchanging: list[object] = []
_places: dict[int, int] = {}


def _fetch(place: int) -> object:
    return _unchanging[place]


def _keep(thing: object) -> tuple[Callable[[int], object], tuple[int]]:
    if id(thing) not in _places:
        _places[id(thing)] = len(_unchanging)
        _unchanging.append(thing)
    return _fetch, (_places[id(thing)],)


def _by_fields(kind: Any) -> Callable[[Any], tuple[Any, Any]]:
    values = attrgetter(*kind.__dataclass_fields__)
    return lambda thing: (kind, values(thing))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    **dict.fromkeys(_UNCHANGING_TYPES, _keep),
    StepPlan: _by_fields(StepPlan),
    StepResult: _by_fields(StepResult),
}


def freeze(world: World) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> World:
    world: World = pickle.loads(frozen)
    return world


def state_key(world: World) -> Hashable:
    """Equal for two worlds that can't be told apart by anything that is still to come."""
    state = world.scheduler._state
    labels = _Labels(world)
    batch, waiting = state.batch, state.waiting
    return (
        tuple(_sequence(world, seq, labels) for seq in state.live.values()),
        frozenset(book.request.request_id for book in world.ledger.books.values()),
        tuple(_in_flight(record, state) for record in state.in_flight),
        tuple(seq.request.request_id for seq in batch.ending.values()),
        tuple(batch.left),
        None if state.decode_rows is None else _decode_rows(state.decode_rows, batch.departed),
        frozenset(seq.request.request_id for seq in batch.departed),
        frozenset(seq.request.request_id for seq in state.prefilling if seq.status is SequenceStatus.RUNNING),
        (state.admit_nobody, state.refilling, world.now_s, world.num_mishaps),
        tuple(labels.of(block) for block in state.tables.pool._cached_free),
        tuple(seq.request.request_id for seq in waiting._not_overtaken if seq.status is SequenceStatus.WAITING),
    )


class _Labels:
    """Names of blocks that don't depend on their numbers: by content, or by who holds them where."""

    def __init__(self, world: World) -> None:
        cache = world.scheduler._state.tables.cache
        self._names = {} if cache is None else cache._hash_of
        self._seen: dict[int, int] = {}

    def of(self, block: int) -> Hashable:
        return self._names.get(block) or self._seen.setdefault(block, len(self._seen))


def _sequence(world: World, seq: Sequence, labels: _Labels) -> Hashable:
    ledger = world.ledger
    book: Book = ledger.live[seq.seq_id]
    queued_at_s = seq.queued_at_s if world.config.policy == "priority" else None
    times = (queued_at_s, seq.overtaken_since_s, seq.kv_blocked_since_s, book.passed_since_s, seq.aged_priority)
    return (
        seq.request.request_id,
        seq.status,
        len(seq.tokens),
        seq.tokens.count(-1),
        seq.num_computed,
        seq.num_scheduled,
        min(seq.num_preemptions, SPARED_AFTER),
        seq.lane,
        seq.announced,
        seq.parked,
        seq.recomputed_until,
        seq.caught_up_at,
        seq.num_hashed,
        (seq.num_slots, seq.plan_due, seq.commit_due),
        seq.admission > 0,
        seq.scheduled_at_s is None,
        seq.seq_id in world.scheduler._state.waiting.returned,
        times,
        tuple(labels.of(block) for block in seq.block_table),
        (book.scheduled, book.ever_computed, seq.seq_id in ledger.admitted),
    )


def _decode_rows(rows: DecodeRows, departed: set[Sequence]) -> Hashable:
    """Every column that the next plan carries on. Of who has departed only that there is a row to drop."""
    sampled = [None] * len(rows.seqs) if rows.sampled is None else rows.sampled
    counts = zip(
        *(rows.plan_due, rows.commit_due, rows.starts, rows.ends, rows.output_index, rows.token_ids, sampled),
        strict=True,
    )
    return (
        tuple(
            (seq.request.request_id, None if seq in departed else (_owned(rows, row), numbers))
            for row, (seq, numbers) in enumerate(zip(rows.seqs, counts, strict=True))
        ),
        frozenset(seq.request.request_id for seq in rows.catching_up if seq not in departed),
        rows.sampled is None,
    )


def _owned(rows: DecodeRows, row: int) -> Hashable:
    """Whether what the columns hold of the sequence is its own, and its lane."""
    seq = rows.seqs[row]
    return (
        rows.seq_ids[row] == seq.seq_id,
        rows.admissions[row] == seq.admission,
        rows.block_tables[row] is seq.block_table,
        rows.known[row] is seq.tokens,
        rows.stop_ids[row] is seq.stop_ids,
        rows.lanes[row],
    )


def _in_flight(record: InFlight, state: SchedulerState) -> Hashable:
    rows = zip(record.seqs, record.ends, record.admissions, record.plan.samples, record.plan.lanes, strict=True)
    decodes, newest = record.decodes, state.decode_rows
    return (
        tuple(
            None
            if seq.status is SequenceStatus.ENDED
            else (seq.request.request_id, end, samples, lane, seq.admission == admission)
            for seq, end, admission, samples, lane in rows
        ),
        tuple(
            None if seq.status is SequenceStatus.ENDED else due
            for seq, due in zip(decodes.seqs, decodes.commit_due, strict=True)
        ),
        (decodes is newest, newest is not None and decodes.commit_due is newest.commit_due),
        state.batch.num_departures != record.num_departures,
        tuple(record.plan.left),
        tuple((joined.seq_id in record.plan.seq_ids, joined.lane) for joined in record.plan.joined),
        record.num_running_before,
    )
