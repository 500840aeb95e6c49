"""The sequences that decode, as columns that are carried from one plan to the next.

A decode that goes on changes by counting: its start is the last plan's end, its token the one sampled there. So a plan
takes the last one's columns, drops who left, inserts who closed its prompt, and looks at a sequence only when its
position reaches the one at which something is due: a block, a full block's name, its last token. Reading 1,024 objects
that lie all over the memory would cost several times more than the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import compress
from operator import attrgetter
from typing import Any

from replica.scheduler.plan import PENDING_TOKEN
from replica.scheduler.sequence import Sequence

by_arrival = attrgetter("arrival")

_COLUMNS = (
    *("seqs", "seq_ids", "lanes", "admissions", "block_tables", "known", "stop_ids", "plan_due", "commit_due"),
    *("starts", "output_index", "token_ids"),
)
_columns = attrgetter(*_COLUMNS)
_MANY = 1 / 16
"""Share of the rows from which on, when so many change, new columns cost less than changed ones."""


class DecodeRows:
    """Sequences with a gap of 1, oldest first; row i of every column is the same sequence. Plans share columns, so a
    change of membership changes copies; only `plan_due` and `commit_due` are kept up to date in place.

    `starts`: the position that the plan computes; `token_ids`: the token there; `admissions`: the stay that the row
    belongs to; `known`: the sequence's own list of tokens. `fresh`: sequences that weren't in the plan before.
    `catching_up`: those whose positions still are input or recomputed. `sampled`: by the step, None before its commit.
    """

    __slots__ = (*_COLUMNS, "catching_up", "ends", "fresh", "sampled")

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        self.seq_ids = [seq.seq_id for seq in seqs]
        self.lanes = [seq.lane for seq in seqs]
        self.admissions = [seq.admission for seq in seqs]
        self.block_tables = [seq.block_table for seq in seqs]
        self.known = [seq.tokens for seq in seqs]
        self.stop_ids = [seq.stop_ids for seq in seqs]
        self.plan_due = [seq.plan_due for seq in seqs]
        self.commit_due = [seq.commit_due for seq in seqs]
        self.starts = [seq.num_scheduled for seq in seqs]
        self.ends = [start + 1 for start in self.starts]
        self.output_index = [seq.num_output_tokens for seq in seqs]
        self.token_ids = [seq.tokens[-1] for seq in seqs]
        self.catching_up = [seq for seq in seqs if seq.num_scheduled < seq.caught_up_at]
        self.fresh = seqs
        self.sampled: list[int] | None = None

    def next(self, left: set[Sequence], closed: list[Sequence]) -> DecodeRows:
        """The rows of the plan after this one: without those who `left` the batch, with those who have `closed` their
        prompt. All others must have been planned and advanced."""
        rows = DecodeRows.__new__(DecodeRows)
        rows.seqs, rows.seq_ids, rows.lanes, rows.admissions = self.seqs, self.seq_ids, self.lanes, self.admissions
        rows.block_tables, rows.known, rows.stop_ids = self.block_tables, self.known, self.stop_ids
        rows.plan_due, rows.commit_due = self.plan_due, self.commit_due
        rows.starts = self.ends
        rows.output_index = [index + 1 for index in self.output_index]
        rows.token_ids = [PENDING_TOKEN] * len(self.seqs) if self.sampled is None else self.sampled
        rows.catching_up = self.catching_up
        if self.catching_up:
            rows.catching_up = [s for s in self.catching_up if s not in left and s.num_scheduled < s.caught_up_at]
        rows.fresh = closed
        rows.sampled = None
        if left or closed:
            rows._change(left, closed)
        rows.ends = [start + 1 for start in rows.starts]
        return rows

    def look_again(self, seq: Sequence) -> None:
        """What is due for this sequence has changed."""
        place = self._place(seq)
        if self.seqs[place : place + 1] == [seq]:
            self.commit_due[place] = seq.commit_due

    def check(self, departed: set[Sequence]) -> None:
        """Raises AssertionError unless the columns say of those who are still there what the sequences say. A
        `commit_due` may be early, and a token may be pending here that is known by now."""
        arrivals = [seq.arrival for seq in self.seqs]
        assert arrivals == sorted(set(arrivals)), "decodes are out of order"
        for row, seq in enumerate(self.seqs):
            if seq not in departed:
                self._check_row(row, seq)
        late = {seq for seq in self.seqs if seq not in departed and seq.num_scheduled - 1 < seq.caught_up_at}
        assert {seq for seq in self.catching_up if seq not in departed} == late, "who catches up is out of date"

    def _check_row(self, row: int, seq: Sequence) -> None:
        start = self.starts[row]
        said = (self.seq_ids[row], start + 1, self.lanes[row], self.admissions[row], self.plan_due[row])
        known = (seq.seq_id, seq.num_scheduled, seq.lane, seq.admission, seq.plan_due)
        assert said == known and self.ends[row] == start + 1, "a decode's columns are out of date"
        assert self.output_index[row] + 1 == seq.num_output_tokens, "a decode's draw has another number"
        assert self.token_ids[row] in (PENDING_TOKEN, seq.tokens[start]), "a decode computes another token"
        assert self.sampled is None or self.sampled[row] == seq.tokens[start + 1], "a decode sampled another token"
        assert self.commit_due[row] <= seq.commit_due, "a decode's commit would miss what is due"
        assert self.block_tables[row] is seq.block_table and self.known[row] is seq.tokens, "columns of another"
        assert self.stop_ids[row] is seq.stop_ids, "columns of another"

    def _place(self, seq: Sequence) -> int:
        return bisect_left(self.seqs, seq.arrival, key=by_arrival)

    def _change(self, left: set[Sequence], closed: list[Sequence]) -> None:
        new = DecodeRows(closed)
        self.catching_up = self.catching_up + new.catching_up
        change = self._rebuilt if len(left) + len(closed) > _MANY * len(self.seqs) else self._patched
        for name, column in zip(_COLUMNS, change(left, new), strict=True):
            setattr(self, name, column)

    def _patched(self, left: set[Sequence], new: DecodeRows) -> list[list[Any]]:
        """One place after the other: each moves what lies behind it in every column."""
        columns: list[list[Any]] = [column.copy() for column in _columns(self)]
        seqs: list[Sequence] = columns[0]
        for seq in left:
            place = bisect_left(seqs, seq.arrival, key=by_arrival)
            if seqs[place : place + 1] == [seq]:
                for column in columns:
                    del column[place]
        for row, seq in enumerate(new.seqs):
            place = bisect_left(seqs, seq.arrival, key=by_arrival)
            for column, values in zip(columns, _columns(new), strict=True):
                column.insert(place, values[row])
        return columns

    def _rebuilt(self, left: set[Sequence], new: DecodeRows) -> list[list[Any]]:
        """Every column anew, once."""
        stays = [seq not in left for seq in self.seqs]
        both = zip(_columns(self), _columns(new), strict=True)
        columns = [[*compress(column, stays), *values] for column, values in both]
        if not new.seqs:
            return columns
        arrivals = [seq.arrival for seq in columns[0]]
        order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        return [[column[row] for row in order] for column in columns]
