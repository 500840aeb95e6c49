import math
import random
from typing import Any

import pytest

from replica.errors import SettingError, Unavailable
from router.config import RouterConfig
from router.picker import BestInTurn
from router.policy import Policy, build_policy
from router.scorers.cost_s import DEFAULT_PREFILL_TOKENS_PER_S
from router.types import Decision, ReplicaView, RouteRequest
from tests.unit.router.loads import request, view

THREE = RouterConfig(weights={"cost_s": 0.0, "kv_headroom": 1.0, "queue_depth": 1.0, "prefix_affinity": 1.0})
CHAIN = tuple(bytes([i]) for i in range(4))


def decide(
    views: list[ReplicaView], *, seed: int = 0, now: float = 2.0, config: RouterConfig | None = None, **changes: Any
) -> Decision:
    return build_policy(config or THREE, random.Random(seed)).decide(request(**changes), views, now)


def test_the_least_loaded_wins_and_the_ranking_goes_on_in_order() -> None:
    decision = decide([view("a", num_running=20), view("b"), view("c", num_running=40)])
    assert [replica_id for replica_id, _ in decision.ranking] == ["b", "a", "c"]
    assert decision.replica_id == "b"
    assert decision.reason == "queue_depth"
    assert decision.report_age_s == 2.0


def test_what_a_stale_winner_costs_is_not_known_unless_all_are_stale() -> None:
    slow: dict[str, Any] = {"num_running": 60, "decode_tokens_per_s": 1.0}
    policy = build_policy(RouterConfig(), random.Random(0))
    policy.chose("b")  # so next in turn, among two that are next to hopeless, is the stale one
    decision = policy.decide(request(), [view("a", is_stale=True), view("b", **slow)], 2.0)
    assert (decision.replica_id, decision.cost_s) == ("a", None)
    decision = policy.decide(request(), [view("a", is_stale=True), view("b", is_stale=True, **slow)], 2.0)
    assert decision.replica_id == "a"
    assert decision.cost_s == pytest.approx(160 / DEFAULT_PREFILL_TOKENS_PER_S)


def test_totals_are_the_weighted_mean_of_the_scores() -> None:
    config = RouterConfig(weights={"cost_s": 0.0, "kv_headroom": 1.0, "queue_depth": 3.0, "prefix_affinity": 0.0})
    decision = decide([view("a"), view("b", num_running=8)], config=config)
    assert decision.parts == {"kv_headroom": pytest.approx(0.9), "queue_depth": 1.0}
    assert dict(decision.ranking) == {"a": pytest.approx((0.9 + 3) / 4), "b": pytest.approx((0.9 + 1.5) / 4)}


@pytest.mark.parametrize(
    ("views", "reason"),
    [
        ([view("a")], "only_candidate"),
        ([view("a"), view("b")], "tie"),
        ([view("a"), view("b", num_running=30)], "queue_depth"),
        ([view("a"), view("b", num_blocks_free=30, num_blocks_total=100)], "kv_headroom"),
        ([view("a", matched_blocks=4), view("b")], "prefix_affinity"),
        ([view("a", draining=True), view("b", draining=True)], "all_draining"),
        ([view("a", num_waiting=1024), view("b", num_waiting=2000)], "all_queue_full"),
    ],
)
def test_the_reason_names_what_decided(views: list[ReplicaView], reason: str) -> None:
    decision = decide(views, block_hashes=CHAIN)
    assert decision.reason == reason


@pytest.mark.parametrize(
    "unfit",
    [view("a", draining=True), view("a", num_waiting=1024), view("a", counts=(1024, 1024, 0, 0))],
    ids=["draining", "queue full", "queue full with what was just sent"],
)
def test_an_unfit_replica_is_no_candidate(unfit: ReplicaView) -> None:
    decision = decide([unfit, view("b", num_running=60, num_waiting=60)])
    assert [replica_id for replica_id, _ in decision.ranking] == ["b"]


def test_a_filter_that_keeps_nobody_is_passed_over_and_the_others_still_hold() -> None:
    decision = decide([view("a", draining=True), view("b", num_waiting=1024)])
    assert [replica_id for replica_id, _ in decision.ranking] == ["b"]
    assert decision.reason == "all_queue_full"


def test_a_silent_replica_ranks_below_loaded_ones_but_still_serves_alone() -> None:
    assert decide([view("a", silent=True), view("b", num_running=60)]).replica_id == "b"
    alone = decide([view("a", silent=True)])
    assert (alone.replica_id, alone.report_age_s) == ("a", math.inf)


def test_without_replicas_it_says_so() -> None:
    with pytest.raises(Unavailable, match="no replica is running"):
        decide([])


def test_ties_are_spread_by_the_random_source() -> None:
    winners = [decide([view("a"), view("b"), view("c")], seed=seed).replica_id for seed in range(60)]
    assert {name: winners.count(name) >= 10 for name in "abc"} == {"a": True, "b": True, "c": True}


def test_equals_are_those_within_the_margin() -> None:
    totals, names = [0.2, 0.95, 1.0, 0.89], ("a", "b", "c", "d")
    assert {BestInTurn(random.Random(seed), margin=0.1)(totals, names)[0] for seed in range(50)} == {1, 2}
    assert sorted(BestInTurn(random.Random(1), margin=0.1)(totals, names)) == [0, 1, 2, 3]


def test_equals_take_turns_and_a_better_one_does_not_wait_for_its_turn() -> None:
    picker, names = BestInTurn(random.Random(3), margin=0.1), ("a", "b", "c")
    chosen = []
    for _ in range(9):
        chosen.append(names[picker([1.0, 1.0, 1.0], names)[0]])
        picker.chose(chosen[-1])
    assert set(chosen[:3]) == {"a", "b", "c"}
    assert chosen[3:] == chosen[:3] * 2
    last = chosen[-1]
    assert names[picker([float(name == last) for name in names], names)[0]] == last
    picker.chose(last)
    assert names[picker([1.0, 1.0, 1.0], names)[0]] == chosen[0]


def test_a_choice_that_nobody_makes_is_nobodys_turn() -> None:
    picker, names = BestInTurn(random.Random(3), margin=0.1), ("a", "b")
    picker.chose("a")
    assert {picker([1.0, 1.0], names)[0] for _ in range(20)} == {1}


def test_a_decision_names_the_best_eight() -> None:
    decision = decide([view(str(i), num_running=i) for i in range(20)])
    assert [replica_id for replica_id, _ in decision.ranking[1:]] == ["1", "2", "3", "4", "5", "6", "7"]


def test_a_new_scorer_needs_no_change_elsewhere() -> None:
    class ByName:
        name = "by_name"

        def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[float]:
            return [float(candidate.load.replica_id == "c") for candidate in views]

    policy = Policy("named", [], [(ByName(), 2.0)], BestInTurn(random.Random(0)))
    decision = policy.decide(request(), [view("a"), view("b"), view("c")], 0.0)
    assert (decision.policy, decision.replica_id, decision.parts) == ("named", "c", {"by_name": 1.0})


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"weights": {"speed": 1.0}}, "weights"),
        ({"weights": {"queue_depth": -0.1}}, "weights.queue_depth"),
        ({"weights": {"queue_depth": 101.0}}, "weights.queue_depth"),
        ({"weights": {"queue_depth": math.nan}}, "weights.queue_depth"),
        ({"weights": {"cost_s": 0.0}}, "weights"),
        ({"policy": "best"}, "router_policy"),
        ({"tau_s": 0.0}, "tau_s"),
        ({"ramp_s": -1.0}, "ramp_s"),
        ({"stale_after_s": 0.0}, "stale_after_s"),
        ({"expire_after_s": math.inf}, "expire_after_s"),
        ({"expected_output_tokens": 0}, "expected_output_tokens"),
        ({"imbalance_cap": 0}, "imbalance_cap"),
        ({"max_num_queued_seqs": 0}, "max_num_queued_seqs"),
        ({"max_prefix_blocks": 0}, "max_prefix_blocks"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        RouterConfig(**changes)
    assert caught.value.param == setting


def test_a_decision_tells_what_it_expects_the_request_to_cost() -> None:
    config = RouterConfig(tau_s=2.0)
    busy = view("b", num_running=9, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)
    decision = decide([view("a", prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0), busy], config=config)
    assert (decision.replica_id, decision.reason) == ("a", "cost_s")
    assert decision.cost_s == pytest.approx(0.16)
    assert decide([view("a")]).cost_s is None
