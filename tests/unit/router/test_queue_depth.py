import pytest

from router.scorers.queue_depth import QueueDepth
from router.types import ReplicaView
from tests.unit.router.loads import request, view

# Each against an idle replica, whose cost is 0: score = 8 / (8 + cost).
CASES = [
    ("idle", view(), 1.0),
    ("eight running", view(num_running=8), 0.5),
    ("eight waiting without KV pressure", view(num_waiting=8), 0.5),
    ("eight just sent", view(counts=(8, 8, 0, 0)), 0.5),
    ("eight of ours count though the report is quiet", view(counts=(8, 0, 0, 0)), 0.5),
    ("ours are among the reported", view(num_running=8, counts=(4, 0, 0, 0)), 0.5),
    ("running alone is not weighted by KV pressure", view(num_running=8, num_blocks_free=0), 0.5),
    ("two waiting, KV full: 2 + 2 * 6 * 0.5 = 8", view(num_waiting=2, num_blocks_free=0), 0.5),
    ("two waiting, KV at 3/4: 2 + 2 * 6 * 0.25 = 5", view(num_waiting=2, num_blocks_free=25), 8 / 13),
    ("cached blocks are no pressure", view(num_waiting=8, num_blocks_free=0, num_blocks_cached=100), 0.5),
    ("prompts just sent are pressure", view(num_blocks_free=50, counts=(2, 2, 800, 0)), 0.5),
]


@pytest.mark.parametrize(("candidate", "score"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_score_falls_with_the_cost(candidate: ReplicaView, score: float) -> None:
    assert QueueDepth()(request(), [candidate, view("idle")]) == [pytest.approx(score), 1.0]


def test_score_is_relative_to_the_least_loaded() -> None:
    views = [view("a", num_running=100), view("b", num_running=108)]
    assert QueueDepth()(request(), views) == [1.0, 0.5]


def test_a_stale_replica_never_counts_as_idle() -> None:
    views = [view("a", is_stale=True), view("b", num_running=8), view("c", num_running=16)]
    assert QueueDepth()(request(), views) == [0.25, 1.0, 0.5]


def test_when_all_are_stale_the_ledger_decides() -> None:
    views = [view("a", silent=True, counts=(8, 8, 0, 0)), view("b", silent=True)]
    assert QueueDepth()(request(), views) == [0.5, 1.0]
