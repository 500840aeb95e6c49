"""The columns of decodes against the sequences: whatever is wrong in one of them is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replica.scheduler.decode_rows import DecodeRows
from tests.unit.scheduler.rig import World, request, world


def decoding() -> tuple[World, DecodeRows]:
    """Three decodes whose columns were carried on, and whose step is committed."""
    w = world()
    for token in (5, 6, 7):
        w.add(request([token], 9, ignore_eos=True))
    for _ in range(3):
        w.step()
    rows = w.scheduler._state.decode_rows
    assert rows is not None and len(rows.seqs) == 3
    w.scheduler.check_invariants()
    return w, rows


def set_to(column: str, value: Any) -> Callable[[DecodeRows], None]:
    def spoil(rows: DecodeRows) -> None:
        getattr(rows, column)[1] = value

    return spoil


def reverse(rows: DecodeRows) -> None:
    for column in DecodeRows.__slots__:
        if column not in ("catching_up", "fresh"):
            getattr(rows, column).reverse()


def late_names(rows: DecodeRows) -> None:
    rows.commit_due[1] = rows.seqs[1].commit_due + 1


def somebody_catches_up(rows: DecodeRows) -> None:
    rows.catching_up = [rows.seqs[1]]


def somebody_recomputes_unseen(rows: DecodeRows) -> None:
    rows.seqs[1].lost(rows.seqs[1].num_scheduled)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (set_to("seq_ids", 0), "a decode's columns are out of date"),
        (set_to("lanes", 0), "a decode's columns are out of date"),
        (set_to("admissions", 1), "a decode's columns are out of date"),
        (set_to("plan_due", 0), "a decode's columns are out of date"),
        (set_to("starts", 1), "a decode's columns are out of date"),
        (set_to("ends", 2), "a decode's columns are out of date"),
        (set_to("output_index", 1), "a decode's draw has another number"),
        (set_to("token_ids", 99), "a decode computes another token"),
        (set_to("sampled", 99), "a decode sampled another token"),
        (set_to("block_tables", []), "columns of another"),
        (set_to("known", []), "columns of another"),
        (set_to("stop_ids", frozenset({3})), "columns of another"),
        (late_names, "a decode's commit would miss what is due"),
        (somebody_catches_up, "who catches up is out of date"),
        (somebody_recomputes_unseen, "who catches up is out of date"),
        (reverse, "decodes are out of order"),
    ],
)
def test_a_column_that_disagrees_with_its_sequence_is_noticed(spoil: Callable[[DecodeRows], None], said: str) -> None:
    w, rows = decoding()
    spoil(rows)
    with pytest.raises(AssertionError, match=f"^{said}"):
        w.scheduler.check_invariants()


@pytest.mark.parametrize(("num_left", "num_closed"), [(0, 1), (1, 0), (1, 1), (20, 0), (0, 20), (7, 13), (20, 20)])
def test_new_columns_are_the_old_ones_changed_place_by_place(num_left: int, num_closed: int) -> None:
    w = world(max_num_seqs=40, max_num_batched_tokens=100)
    for token in range(40):
        w.add(request([token, token], 9, ignore_eos=True))
    w.step()
    everybody = w.scheduler._state.batch.running
    rows, first = DecodeRows(everybody[::2]), 10 - num_left // 2
    left = set(rows.seqs[first : first + num_left])
    new = DecodeRows(everybody[1::2][:num_closed][::-1])
    assert (len(left), len(new.seqs)) == (num_left, num_closed)
    patched = rows._patched(left, new)
    assert rows._rebuilt(left, new) == patched
    assert patched[0] == [seq for seq in everybody if seq not in left and seq in {*rows.seqs, *new.seqs}]
    assert rows.seqs == everybody[::2], "plans share columns"


def test_many_that_leave_and_enter_at_once_are_as_good_as_one_by_one() -> None:
    w = world(num_blocks=400, max_num_seqs=40, max_num_batched_tokens=100)
    for number in range(100):
        w.add(request([number % 50, 7], 3 + 5 * (number % 2), ignore_eos=True))
    w.drain()
    w.check_outputs()


def test_of_who_has_departed_nothing_is_asked() -> None:
    w, rows = decoding()
    w.abort(1)
    set_to("output_index", 99)(rows)
    w.scheduler.check_invariants()
    w.drain()
    w.check_outputs()


def test_a_runner_that_reuses_the_list_of_its_last_result_is_noticed() -> None:
    w, _ = decoding()
    plan = w.plan()
    assert plan is not None
    _, step = w.in_flight.pop()
    result = step.result()
    w.commit_result(plan, result)
    w.scheduler.check_invariants()
    result.token_ids[1] += 1
    with pytest.raises(AssertionError, match="a decode sampled another token"):
        w.scheduler.check_invariants()
