import pytest

from router.scorers.kv_headroom import KvHeadroom
from router.types import ReplicaView
from tests.unit.router.loads import request, view

# The request needs 10 blocks of prompt and 10 of output; a replica has 100 blocks.
CASES = [
    ("empty replica: 80 of 100 blocks are left over", view(), 0.9),
    ("exact fit", view(num_blocks_free=20), 0.5),
    ("cached blocks are free to take", view(num_blocks_free=0, num_blocks_cached=20), 0.5),
    ("half of it fits", view(num_blocks_free=10), 0.25),
    ("nothing is free", view(num_blocks_free=0), 0.0),
    ("matched blocks needn't be taken", view(num_blocks_free=10, matched_blocks=10), 0.5),
    ("waiting tokens claim blocks", view(num_blocks_free=30, num_waiting_tokens=160), 0.5),
    ("the mid-prefill remainder claims blocks", view(num_blocks_free=30, num_prefill_tokens=160), 0.5),
    ("what was just sent claims prompt and output", view(num_blocks_free=40, counts=(1, 1, 160, 160)), 0.5),
    ("claims beyond what is there", view(num_blocks_free=10, num_waiting_tokens=9999), 0.0),
    ("no report", view(silent=True), 0.5),
    ("a report without a KV cache", view(num_blocks_total=0, num_blocks_free=0), 0.0),
]


@pytest.mark.parametrize(("candidate", "score"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_score_is_the_room_left_for_the_whole_request(candidate: ReplicaView, score: float) -> None:
    assert KvHeadroom(expected_output_tokens=256)(request(), [candidate]) == [pytest.approx(score)]


def test_a_large_max_tokens_counts_as_the_expected_output_for_every_sequence() -> None:
    wanted = request(max_tokens=100_000, n=2)  # 10 blocks + 2 * 10 blocks
    assert KvHeadroom(expected_output_tokens=160)(wanted, [view(num_blocks_free=30)]) == [0.5]


def test_a_stale_replica_scores_half_of_the_worst_fresh_one() -> None:
    scorer = KvHeadroom(expected_output_tokens=256)
    views = [view("a", is_stale=True), view("b", num_blocks_free=60), view("c", silent=True)]
    assert scorer(request(), views) == [pytest.approx(0.35), pytest.approx(0.7), pytest.approx(0.35)]
