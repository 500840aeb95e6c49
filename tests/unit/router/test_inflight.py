from collections.abc import Callable

import pytest

from router.inflight import MAX_OVER, InflightLedger, LedgerCounts
from tests.unit.router.loads import report, request

PENDING = LedgerCounts(1, 1, 160, 160, prefill_tokens=160, pending_prefill_tokens=160)
REPORTED = LedgerCounts(num_in_flight=1, prefill_tokens=160)


SENT = request("r")


@pytest.fixture
def ledger() -> InflightLedger:
    ledger = InflightLedger(expected_output_tokens=256, expire_after_s=10.0, remember_ended_s=5.0)
    ledger.sent(SENT, "a", 0.0)
    return ledger


def test_a_sent_request_pends_with_its_prompt_and_expected_output(ledger: InflightLedger) -> None:
    assert ledger.counts() == {"a": PENDING}


def test_expected_output_is_bounded_and_counts_every_sequence() -> None:
    ledger = InflightLedger(expected_output_tokens=100)
    ledger.sent(request("r", max_tokens=5000, n=3), "a", 0.0)
    assert ledger.counts() == {"a": LedgerCounts(3, 3, 160, 300, 160, 160)}
    ledger.ended("r", 1.0)
    assert ledger.counts() == {}


def test_a_report_says_nothing_of_a_request_that_was_not_accepted_yet(ledger: InflightLedger) -> None:
    ledger.reported(report("a", number=1))
    ledger.reported(report("a", number=2))
    assert ledger.counts() == {"a": PENDING}


def test_it_pends_until_a_report_made_after_its_acceptance(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a", number=5), 1.0)
    ledger.reported(report("a", number=5))
    assert ledger.counts() == {"a": PENDING}
    ledger.reported(report("a", number=6))
    assert ledger.counts() == {"a": REPORTED}


def test_a_newer_report_that_came_first_settles_it_at_acceptance(ledger: InflightLedger) -> None:
    ledger.reported(report("a", number=7))
    ledger.accepted("r", "a", report("a", number=5), 1.0)
    assert ledger.counts() == {"a": REPORTED}


def test_acceptance_without_a_report_waits_for_the_next_one(ledger: InflightLedger) -> None:
    ledger.reported(report("a", number=7))
    ledger.accepted("r", "a", None, 1.0)
    assert ledger.counts() == {"a": PENDING}
    ledger.reported(report("a", number=8))
    assert ledger.counts() == {"a": REPORTED}


def test_acceptance_before_any_report_is_settled_by_the_first(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", None, 1.0)
    ledger.reported(report("a", number=0))
    assert ledger.counts() == {"a": REPORTED}


def test_another_epoch_lost_what_the_old_one_had_accepted(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a", number=5), 1.0)
    ledger.sent(request("new"), "a", 1.0)
    ledger.reported(report("a", epoch="life-2", number=0))
    assert ledger.counts() == {"a": LedgerCounts(2, 1, 160, 160, 320, 160)}


def test_later_messages_are_no_second_acceptance(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a", number=5), 1.0)
    ledger.accepted("r", "a", report("a", number=9), 2.0)
    ledger.reported(report("a", number=6))
    assert ledger.counts() == {"a": REPORTED}


def test_a_request_sent_again_is_open_at_one_replica_only(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a", number=5), 1.0)
    ledger.sent(request("r"), "b", 2.0)
    assert ledger.counts() == {"b": PENDING}
    assert len(ledger) == 1


@pytest.mark.parametrize("move", [lambda led: led.routed(SENT, "b"), lambda led: led.accepted("r", "b", None, 1.0)])
def test_it_follows_the_request_to_the_replica_that_really_got_it(
    ledger: InflightLedger, move: Callable[[InflightLedger], object]
) -> None:
    move(ledger)
    assert ledger.counts() == {"b": PENDING}


@pytest.mark.parametrize(
    "leave",
    [
        lambda led: led.ended("r", 1.0),
        lambda led: led.released(SENT),
        lambda led: led.forget("a"),
        lambda led: led.expire(10.1),
    ],
    ids=["ended", "released", "replica gone", "expired"],
)
@pytest.mark.parametrize("stage", ["sent", "accepted", "reported"])
def test_every_way_out_empties_the_ledger(
    ledger: InflightLedger, leave: Callable[[InflightLedger], object], stage: str
) -> None:
    if stage != "sent":
        ledger.accepted("r", "a", report("a", number=1), 0.0)
    if stage == "reported":
        ledger.reported(report("a", number=2))
    leave(ledger)
    assert (len(ledger), ledger.counts()) == (0, {})
    ledger.reported(report("a", number=3))
    assert ledger.counts() == {}


def test_a_decision_that_was_under_way_when_the_request_ended_opens_nothing(ledger: InflightLedger) -> None:
    ledger.ended("late", 1.0)
    ledger.sent(request("late"), "a", 2.0)
    assert ledger.counts() == {"a": PENDING}
    ledger.sent(request("late"), "a", 6.1)  # by then the id is free again
    assert ledger.counts()["a"].num_in_flight == 2


@pytest.mark.parametrize("sent_again_to", ["a", "b"])
def test_what_is_told_late_of_an_earlier_try_leaves_the_next_one_as_it_is(
    ledger: InflightLedger, sent_again_to: str
) -> None:
    ledger.sent(request("r"), sent_again_to, 1.0)
    assert ledger.routed(SENT, "c") is False
    ledger.released(SENT)
    assert ledger.counts() == {sent_again_to: PENDING}


def test_where_a_call_went_that_is_over_unheard_is_known_until_the_request_ends_or_is_sent_again(
    ledger: InflightLedger,
) -> None:
    ledger.released(SENT)
    assert (ledger.replica_of("r"), ledger.last_replica_of("r")) == (None, "a")
    ledger.sent(request("r"), "b", 1.0)
    assert ledger.last_replica_of("r") == "b"
    ledger.ended("r", 2.0)
    assert ledger.last_replica_of("r") is None
    other = request("other")
    ledger.sent(other, "c", 3.0)
    ledger.released(other)
    ledger.ended("other", 4.0)
    assert ledger.last_replica_of("other") is None


@pytest.mark.parametrize("heard_first", [True, False])
def test_a_replica_that_was_heard_is_not_remembered_when_its_call_is_over(
    ledger: InflightLedger, heard_first: bool
) -> None:
    if heard_first:
        ledger.accepted("r", "a", None, 1.0)
    ledger.released(SENT)
    ledger.accepted("r", "a", None, 1.0)
    assert ledger.last_replica_of("r") is None


def test_of_calls_that_are_over_the_latest_are_remembered(ledger: InflightLedger) -> None:
    calls = [request(f"r{number}") for number in range(MAX_OVER + 1)]
    for call in calls:
        ledger.sent(call, "a", 1.0)
        ledger.released(call)
    assert [ledger.last_replica_of(f"r{number}") for number in (0, 1, MAX_OVER)] == [None, "a", "a"]


def test_messages_keep_a_long_stream_from_expiring(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a"), 9.0)
    assert ledger.expire(15.0) == 0
    ledger.accepted("r", "a", report("a", number=2), 18.0)
    assert ledger.expire(27.0) == 0
    assert ledger.expire(28.1) == 1


def test_strangers_are_ignored(ledger: InflightLedger) -> None:
    ledger.accepted("?", "a", None, 1.0)
    ledger.routed(request("?"), "b")
    ledger.released(request("?"))
    ledger.ended("?", 1.0)
    ledger.forget("z")
    assert ledger.counts() == {"a": PENDING}
