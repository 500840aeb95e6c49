"""What an explanation says of a decision, against views that a test has laid out."""

from __future__ import annotations

import random

import pytest

from replica.errors import Unavailable
from router.config import RouterConfig
from router.shortlist import MAX_SCORED
from router.state import RouterState
from tests.unit.router.loads import CHAIN, Clock, report, request

RATES = {"prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 100.0}


def a_state(clock: Clock | None = None, **settings: object) -> RouterState:
    state = RouterState(RouterConfig(**settings), clock=clock or Clock(), rng=random.Random(1))  # type: ignore[arg-type]
    state.retain("abc")
    return state


def test_candidates_come_best_first_with_their_scores_and_parts() -> None:
    state = a_state(ramp_s=0.0)
    for replica_id, num_running in (("a", 9), ("b", 0), ("c", 4)):
        state.observe(report(replica_id, num_running=num_running, **RATES))
    told = state.explain(request())
    assert [one.view.load.replica_id for one in told.candidates] == ["b", "c", "a"]
    best = told.candidates[0]
    assert best.cost is not None
    assert [best.cost.own_prefill_s, best.cost.total_s] == pytest.approx([0.16, 0.16])
    assert best.total == best.scores["cost_s"] == pytest.approx(1 / 1.16)
    assert told.decision.cost_s == pytest.approx(0.16)
    assert (told.weights, told.num_replicas, told.num_output_tokens) == ({"cost_s": 1.0}, 3, 160)
    assert told.candidates[2].cost is not None and told.candidates[2].cost.load_s > 0.9


def test_who_holds_the_prefix_is_told_and_its_prefill_is_less() -> None:
    state = a_state(ramp_s=0.0)
    for replica_id in "abc":
        state.observe(report(replica_id, **RATES))
    state.index.learn("c", CHAIN)
    told = state.explain(request(block_hashes=CHAIN))
    assert told.matched == {"c": 4}
    by_id = {one.view.load.replica_id: one for one in told.candidates}
    here, elsewhere = by_id["c"].cost, by_id["a"].cost
    assert here is not None and elsewhere is not None
    assert here.own_prefill_s == pytest.approx(0.16 - 0.064)
    assert elsewhere.own_prefill_s == pytest.approx(0.16 + 2 * 0.064)
    assert told.decision.replica_id == "c"


def test_who_was_kept_out_is_listed_last_with_the_filter() -> None:
    state = a_state()
    state.observe(report("a", draining=True))
    state.observe(report("b", num_waiting=2000))
    state.observe(report("c", num_running=60))
    told = state.explain(request())
    found = [(one.view.load.replica_id, one.kept_out_by, one.total is None) for one in told.candidates]
    assert found == [("c", "", False), ("a", "draining", True), ("b", "queue_full", True)]
    assert told.decision.reason == "only_candidate"


def test_a_filter_that_keeps_nobody_keeps_nobody_out() -> None:
    state = a_state()
    for replica_id in "abc":
        state.observe(report(replica_id, draining=True))
    told = state.explain(request())
    assert [one.kept_out_by for one in told.candidates] == ["", "", ""]
    assert told.decision.reason == "all_draining"


def test_policies_without_costs_explain_without_them() -> None:
    told = a_state(policy="power_of_two").explain(request())
    assert [one.cost for one in told.candidates] == [None, None]
    assert told.weights == {"queue_depth": 1.0}
    assert (told.num_replicas, told.decision.report_age_s) == (3, float("inf"))


def test_of_many_replicas_those_are_told_that_a_decision_looks_at() -> None:
    state = a_state()
    state.retain([f"r{i}" for i in range(1000)])
    told = state.explain(request())
    assert told.num_replicas == 1000
    assert MAX_SCORED * 0.8 < len(told.candidates) <= MAX_SCORED


def test_a_question_says_nothing_of_how_many_may_be_ejected() -> None:
    state = a_state()
    state.choose(request(), ["a"])
    state.explain(request())
    assert state.health.num_replicas == 1


def test_a_choice_among_nobody_is_refused_whatever_the_prompt() -> None:
    with pytest.raises(Unavailable):
        a_state().choose(request(block_hashes=CHAIN), [])
