"""Batches of changes leave the index as if they had come in order, whatever the order in which they come."""

from __future__ import annotations

from itertools import permutations

import pytest

from replica.request import LoadReport
from router.prefix_changes import MAX_BATCHES, PrefixChanges
from router.prefix_index import PrefixIndex
from tests.unit.router.loads import report


def batch(number: int, added: bytes = b"", evicted: bytes = b"", replica_id: str = "a") -> LoadReport:
    """Blocks are named by one letter each."""
    return report(
        replica_id,
        block_hashes_number=number,
        block_hashes_added=tuple(bytes([letter]) for letter in added),
        block_hashes_evicted=tuple(bytes([letter]) for letter in evicted),
    )


def held(index: PrefixIndex, blocks: bytes, replica_id: str = "a") -> bytes:
    return bytes(letter for letter in blocks if replica_id in index.match([bytes([letter])]))


BATCHES = (batch(1, added=b"xy"), batch(2, evicted=b"x", added=b"z"), batch(4, added=b"x", evicted=b"z"), batch(5))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_any_order_ends_as_the_right_one(order: tuple[int, ...]) -> None:
    index = PrefixIndex(100)
    changes = PrefixChanges(index)
    for i in order:
        changes.apply(BATCHES[i])
    assert held(index, b"xyz") == b"xy"


def test_a_copy_of_an_older_batch_changes_nothing() -> None:
    index = PrefixIndex(100)
    changes = PrefixChanges(index)
    for change in (BATCHES[0], BATCHES[1], BATCHES[0]):
        changes.apply(change)
    assert held(index, b"xyz") == b"yz"


def test_a_batch_that_never_comes_holds_up_nothing() -> None:
    index = PrefixIndex(100)
    PrefixChanges(index).apply(batch(9, added=b"x"))
    assert held(index, b"x") == b"x"


def test_replicas_do_not_mix() -> None:
    index = PrefixIndex(100)
    changes = PrefixChanges(index)
    changes.apply(batch(2, added=b"x", replica_id="a"))
    changes.apply(batch(1, evicted=b"x", replica_id="a"))
    changes.apply(batch(1, added=b"x", replica_id="b"))
    changes.forget("a")
    assert index.match([b"x"]) == {"b": 1}
    changes.apply(batch(1, added=b"y", replica_id="a"))
    assert index.match([b"y"]) == {"a": 1}


def test_what_is_remembered_is_bounded() -> None:
    changes = PrefixChanges(PrefixIndex(100))
    for number in range(1, 3 * MAX_BATCHES):
        changes.apply(batch(number, added=b"x"))
    assert len(changes._applied["a"]) == MAX_BATCHES
