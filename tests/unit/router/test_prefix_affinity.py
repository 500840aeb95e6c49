import pytest

from router.scorers.prefix_affinity import PrefixAffinity
from router.types import ReplicaView
from tests.unit.router.loads import request, view

CHAIN = tuple(bytes([i]) for i in range(4))

# Each against a replica that holds nothing of the four blocks and has one request running.
CASES = [
    ("nothing matches", view(num_running=1), 0.0),
    ("all match", view(num_running=1, matched_blocks=4), 1.0),
    ("half match", view(num_running=1, matched_blocks=2), 0.5),
    ("less loaded than the other", view(matched_blocks=4), 1.0),
    ("two ahead of the least loaded, cap 4", view(num_running=3, matched_blocks=4), 0.5),
    ("at the cap", view(num_running=5, matched_blocks=4), 0.0),
    ("far beyond the cap", view(num_running=50, matched_blocks=4), 0.0),
    ("what was just sent counts", view(num_running=1, counts=(2, 2, 0, 0), matched_blocks=4), 0.5),
    ("it would wait there and not elsewhere", view(num_running=1, max_num_seqs=1, matched_blocks=4), 0.0),
    ("stale while the other is fresh", view(num_running=1, matched_blocks=4, is_stale=True), 0.0),
]


@pytest.mark.parametrize(("candidate", "score"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_score_is_the_matched_share_while_the_favourite_is_not_ahead(candidate: ReplicaView, score: float) -> None:
    other = view("other", num_running=1)
    assert PrefixAffinity(imbalance_cap=4)(request(block_hashes=CHAIN), [candidate, other]) == [score, 0.0]


def test_waiting_everywhere_leaves_the_favourite_its_score() -> None:
    views = [view("a", num_running=1, max_num_seqs=1, matched_blocks=4), view("b", num_running=1, max_num_seqs=1)]
    assert PrefixAffinity(imbalance_cap=4)(request(block_hashes=CHAIN), views) == [1.0, 0.0]


def test_stale_everywhere_leaves_the_favourite_its_score() -> None:
    views = [view("a", silent=True, matched_blocks=4), view("b", silent=True)]
    assert PrefixAffinity(imbalance_cap=4)(request(block_hashes=CHAIN), views) == [1.0, 0.0]


def test_a_prompt_without_a_full_block_has_no_favourite() -> None:
    assert PrefixAffinity(imbalance_cap=4)(request(), [view("a"), view("b")]) == [0.0, 0.0]
