import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from replica.errors import Unavailable
from replica.metrics import Metrics
from replica.request import StreamMessage
from router.config import RouterConfig
from router.health import EJECT_AFTER, FIRST_S
from router.inflight import LedgerCounts
from router.load import load_of
from router.metrics import ROUTER_METRICS
from router.state import RouterState
from router.states import state_for
from router.views import SILENT_AFTER_S
from tests.unit.router.loads import CHAIN, Clock, report, request


def spread(counts: dict[str, LedgerCounts], replica_ids: list[str]) -> float:
    """Requests at the most loaded replica over the mean."""
    sent = [counts[replica_id].num_in_flight for replica_id in replica_ids if replica_id in counts]
    return max(sent) / (sum(sent) / len(replica_ids))


def test_a_decision_enters_the_ledger_at_the_winner(state: RouterState) -> None:
    decision = state.choose(request(), ["a", "b", "c"])
    assert state.ledger.counts() == {decision.replica_id: (1, 1, 160, 160, 160, 160, 0, 0)}


def test_the_ledger_knows_how_surely_other_routers_send_a_request_to_the_same_replica(state: RouterState) -> None:
    """To a prompt's home surely; else the more surely the fewer hold what of it is cached there."""
    hashes = tuple(bytes([i]) for i in range(10))

    def drawn() -> dict[str, int]:
        return {replica_id: counts.drawn_percent for replica_id, counts in state.ledger.counts().items()}

    home = state.choose(request("first", block_hashes=hashes), ["a", "b", "c"]).replica_id
    assert drawn() == {home: 100}
    state.ended("first")
    state.choose(request("second", block_hashes=hashes), ["a", "b", "c"])
    assert drawn() == {home: 100}
    state.ended("second")
    for other in {"a", "b", "c"} - {home}:
        state.index.learn(other, hashes)
    assert list(drawn_by_third(state, hashes).values()) == [33]


def drawn_by_third(state: RouterState, hashes: tuple[bytes, ...]) -> dict[str, int]:
    state.choose(request("third", block_hashes=hashes), ["a", "b", "c"])
    return {replica_id: counts.drawn_percent for replica_id, counts in state.ledger.counts().items()}


def test_the_whole_life_of_a_request_leaves_nothing(state: RouterState) -> None:
    sent = request("r")
    winner = state.choose(sent, ["a", "b", "c"]).replica_id
    state.routed(sent, winner)
    state.received("r", StreamMessage(winner, load=report(winner, number=2)))
    state.received("r", StreamMessage(winner, load=report(winner, number=3, num_running=1)))
    assert state.ledger.counts() == {winner: (1, 0, 0, 0, 160, 0, 0, 0)}
    load = load_of(winner, state.views.seen(winner), state.ledger.counts_of(winner))
    assert (load.num_outstanding, load.num_waiting) == (1, 0)
    state.ended("r")
    assert (len(state.ledger), state.ledger.counts()) == (0, {})


def test_excluded_replicas_are_left_out_unless_that_leaves_nobody(state: RouterState) -> None:
    assert state.choose(request("r"), ["a", "b"], exclude={"a"}).replica_id == "b"
    assert state.choose(request("s"), ["a"], exclude={"a"}).replica_id == "a"
    with pytest.raises(Unavailable):
        state.choose(request("t"), [])


def test_a_view_turns_stale_with_time_and_fresh_with_news(state: RouterState, clock: Clock) -> None:
    state.observe(report("b", number=2, num_running=20))
    assert state.choose(request("r"), ["a", "b"]).replica_id == "a"
    clock.now_s += 5.1
    state.observe(report("b", number=3, num_running=20))
    assert state.choose(request("s"), ["a", "b"]).replica_id == "b"
    state.observe(report("a", number=2))
    assert state.choose(request("t"), ["a", "b"]).replica_id == "a"


def test_a_replica_that_did_not_answer_is_the_last_choice_until_it_reports_again(state: RouterState) -> None:
    state.observe(report("b", number=2, num_running=20))
    state.distrust("a")
    state.observe(report("a", number=1))  # a copy of what it said before
    assert state.choose(request("r"), ["a", "b"]).replica_id == "b"
    assert state.choose(request("s"), ["a"]).replica_id == "a"
    state.observe(report("a", number=2))
    assert state.choose(request("t"), ["a", "b"]).replica_id == "a"
    state.distrust("nobody knows it")
    assert state.views.seen("nobody knows it") is None


def test_replicas_that_are_dead_or_silent_do_not_count_as_answering(state: RouterState, clock: Clock) -> None:
    assert state.num_answering() == 0  # nothing is known of who runs
    state.retain(["a", "b", "c", "new"])
    assert state.num_answering() == 4
    for replica_id in ("a", "new"):
        state.distrust(replica_id)
    assert state.num_answering() == 2
    state.observe(report("a", number=1))  # a copy of what it said before
    assert state.num_answering() == 2
    for replica_id in ("a", "new"):
        state.observe(report(replica_id, number=2))
    assert state.num_answering() == 4
    state.distrust("a")
    state.died("a")
    assert state.num_answering() == 3
    clock.now_s += SILENT_AFTER_S + 0.1
    state.observe(report("b", number=2))
    assert state.num_answering() == 1


def test_what_is_said_of_a_replica_that_is_gone_is_not_kept(state: RouterState) -> None:
    state.retain(["a"])
    state.distrust("b")
    state.distrust("new")
    state.retain(["a", "b", "new"])
    assert state.num_answering() == 3


def test_a_dead_replica_is_forgotten_and_its_late_reports_are_ignored(state: RouterState) -> None:
    state.retain(["a", "b", "c"])
    state.observe(report("a", number=2, block_hashes_added=CHAIN))
    state.choose(request("r"), ["a"])
    state.died("a")
    state.observe(report("a", number=3))
    assert state.ledger.counts() == {}
    assert state.index.match(CHAIN) == {}
    assert set(state.views.newest()) == {"b", "c"}


def test_replicas_that_left_are_forgotten(state: RouterState) -> None:
    state.retain(["a", "b", "c"])
    state.choose(request("r"), ["a"])
    state.retain(["b", "d"])
    assert state.ledger.counts() == {}
    assert set(state.views.newest()) == {"b"}
    assert state.replica_ids() == ["b", "d"]
    state.observe(report("d"))
    assert [known.replica_id for known in state.reports()] == ["b", "d"]
    state.died("b")
    assert state.replica_ids() == ["d"]


def test_what_was_sent_and_reported_makes_the_prefix_favourite(state: RouterState) -> None:
    state.choose(request("r", block_hashes=CHAIN), ["b"])
    state.ended("r")
    assert state.choose(request("s", block_hashes=CHAIN), ["a", "b", "c"]).replica_id == "b"
    state.ended("s")
    state.observe(report("b", number=2, block_hashes_evicted=CHAIN))
    state.observe(report("c", number=2, block_hashes_added=CHAIN))
    decision = state.choose(request("t", block_hashes=CHAIN), ["a", "b", "c"])
    assert (decision.replica_id, decision.reason) == ("c", "cost_s")


@pytest.mark.parametrize("bare_number", [5, 6], ids=["of the same step", "of a later step"])
def test_changes_count_although_a_message_without_them_came_first(state: RouterState, bare_number: int) -> None:
    state.observe(report("c", number=bare_number))
    state.observe(report("c", number=5, block_hashes_added=CHAIN, block_hashes_number=1))
    assert state.index.match(CHAIN) == {"c": 4}
    assert state.views.newest()["c"].report.number == bare_number


def test_a_life_that_is_over_changes_nothing_and_its_cache_is_forgotten(state: RouterState) -> None:
    state.observe(report("c", number=2, block_hashes_added=CHAIN, block_hashes_number=7))
    state.observe(report("c", epoch="life-2", number=0))
    assert state.index.match(CHAIN) == {}
    state.observe(report("c", number=3, block_hashes_added=CHAIN, block_hashes_number=8))
    assert state.index.match(CHAIN) == {}
    state.observe(report("c", epoch="life-2", number=0, block_hashes_added=CHAIN[:1], block_hashes_number=1))
    assert state.index.match(CHAIN) == {"c": 1}


def test_without_prefix_caches_no_prefix_is_learned(clock: Clock) -> None:
    state = RouterState(RouterConfig(prefix_caching=False), clock=clock)
    assert not state.uses_prefixes
    state.observe(report("a", block_hashes_added=CHAIN, block_hashes_number=1))
    state.choose(request("r", block_hashes=CHAIN), ["a", "b"])
    assert len(state.index) == 0


def test_silence_expires_and_is_counted(state: RouterState, clock: Clock) -> None:
    metrics = Metrics(ROUTER_METRICS, {"replica": "ingress"})
    state.attach(metrics, "model")
    state.choose(request("lost"), ["a"])
    clock.now_s += 301.0
    state.choose(request("r"), ["a"])
    assert len(state.ledger) == 1
    labels = {"replica": "ingress", "model_name": "model"}
    assert metrics.registry.get_sample_value("brimful_router_expired_requests_total", labels) == 1


def test_decisions_are_counted_by_reason(state: RouterState, clock: Clock) -> None:
    metrics = Metrics(ROUTER_METRICS, {"replica": "ingress"})
    state.attach(metrics, "model")
    clock.now_s += 0.5
    state.choose(request("r"), ["a"])
    state.choose(request("s"), ["never spoke"])
    value, labels = metrics.registry.get_sample_value, {"replica": "ingress", "model_name": "model"}
    by = {**labels, "policy": "weighted", "reason": "only_candidate"}
    assert value("brimful_router_decisions_total", by) == 2
    assert value("brimful_router_decisions_total", {**by, "reason": "all_draining"}) == 0
    assert value("brimful_router_decision_seconds_count", labels) == 2
    assert value("brimful_router_report_age_seconds_sum", labels) == 0.5
    assert value("brimful_router_requests_in_flight", labels) == 2
    state.ended("r")
    assert value("brimful_router_requests_in_flight", labels) == 1


@pytest.mark.parametrize("delay", ["no report ever", "one report before the burst", "reports that show the past"])
@pytest.mark.parametrize("prefix", [(), CHAIN], ids=["own prompts", "one shared prefix"])
@pytest.mark.parametrize("num_replicas", [4, 8])
def test_a_burst_of_64_does_not_herd(clock: Clock, delay: str, prefix: tuple[bytes, ...], num_replicas: int) -> None:
    state = RouterState(clock=clock, rng=random.Random(7))
    replica_ids = [f"replica-{i}" for i in range(num_replicas)]
    for number in range(64):
        if delay == "reports that show the past" or (delay == "one report before the burst" and number == 0):
            for replica_id in replica_ids:
                state.observe(report(replica_id, number=number + 1, num_blocks_total=4000, num_blocks_free=4000))
        winner = state.choose(request(f"r{number}", block_hashes=prefix), replica_ids).replica_id
        state.accepted(f"r{number}", winner, state.views.newest()[winner].report if state.views.newest() else None)
    assert spread(state.ledger.counts(), replica_ids) <= 1.5


def test_routers_that_see_the_same_old_reports_do_not_herd(clock: Clock) -> None:
    """A burst of 64 over 4 ingress processes: each knows only what it sent itself."""
    replica_ids = [f"replica-{i}" for i in range(8)]
    sent = dict.fromkeys(replica_ids, 0)
    for process in range(4):
        state = RouterState(clock=clock, rng=random.Random(process))
        for replica_id in replica_ids:
            state.observe(report(replica_id))
        for number in range(16):
            sent[state.choose(request(f"{process}-{number}"), replica_ids).replica_id] += 1
    assert max(sent.values()) / (64 / 8) <= 1.5


def test_a_popular_prefix_uses_all_replicas_once_the_favourite_is_ahead(state: RouterState) -> None:
    state.observe(report("a", number=2, block_hashes_added=CHAIN))
    winners = [state.choose(request(f"r{i}", block_hashes=CHAIN), ["a", "b", "c"]).replica_id for i in range(12)]
    assert winners[0] == "a"
    assert set(winners) == {"a", "b", "c"}


def test_of_many_replicas_the_favourites_and_a_sample_are_looked_at(state: RouterState) -> None:
    replica_ids = [f"replica-{i}" for i in range(300)]
    for replica_id in replica_ids:
        state.observe(report(replica_id, num_running=0 if replica_id == "replica-7" else 3))
    state.observe(report("replica-7", number=2, block_hashes_added=CHAIN))
    assert state.choose(request("r", block_hashes=CHAIN), replica_ids).replica_id == "replica-7"
    winners = [state.choose(request(f"s{i}"), replica_ids).replica_id for i in range(64)]
    assert max(winners.count(winner) for winner in winners) <= 2


def test_the_same_settings_again_keep_what_is_known(state: RouterState) -> None:
    state.choose(request("r"), ["a"])
    state.configure(RouterConfig())
    assert len(state.ledger) == 1
    state.configure(RouterConfig(imbalance_cap=9))
    assert (len(state.ledger), state.config.imbalance_cap) == (0, 9)


def test_one_state_a_deployment_in_this_process() -> None:
    assert state_for("app", "replica-x") is state_for("app", "replica-x")
    assert state_for("app", "replica-x") is not state_for("app", "replica-y")
    assert state_for("app", "replica-x") is not state_for("other", "replica-x")


def test_router_and_ingress_threads_leave_an_empty_ledger(clock: Clock) -> None:
    """One thread decides, four live through the requests; whatever the interleaving, nothing stays."""
    state = RouterState(clock=clock)
    replica_ids = ["a", "b", "c"]

    def live(worker: int) -> None:
        for i in range(100):
            request_id = f"{worker}-{i}"
            winner = state.choose(request(request_id, block_hashes=CHAIN), replica_ids).replica_id
            state.received(request_id, StreamMessage(winner, load=report(winner, number=worker * 1000 + i)))
            if i % 10 == 0:
                state.died(replica_ids[worker % 3])
            state.ended(request_id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(live, range(4)))
    assert (len(state.ledger), state.ledger.counts()) == (0, {})


def eject(state: RouterState, replica_id: str) -> None:
    state.health.num_replicas = 3
    for number in range(EJECT_AFTER):
        state.health.failed(f"failed-{number}", replica_id)
        state.health.succeeded(f"failed-{number}", "b")


def test_a_decision_that_was_under_way_when_its_request_ended_is_no_trial(state: RouterState, clock: Clock) -> None:
    eject(state, "a")
    clock.now_s += FIRST_S
    state.ended("late")
    assert state.choose(request("late"), ["a"]).replica_id == "a"
    clock.now_s += FIRST_S
    assert state.health.candidates("abc") == "abc"


def test_a_trial_that_serve_routes_elsewhere_is_followed_by_another(state: RouterState, clock: Clock) -> None:
    eject(state, "a")
    clock.now_s += FIRST_S
    trial = request("r")
    assert state.choose(trial, ["a"]).replica_id == "a"
    state.routed(trial, "b")
    clock.now_s += FIRST_S
    assert state.health.candidates("abc") == "abc"
