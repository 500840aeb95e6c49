from collections.abc import Callable

import pytest

from router.inflight import InflightLedger, LedgerCounts
from tests.unit.router.loads import report, request

PENDING = LedgerCounts(1, 1, 160, 160, prefill_tokens=160, pending_prefill_tokens=160)
REPORTED = LedgerCounts(num_in_flight=1, prefill_tokens=160)


@pytest.fixture
def ledger() -> InflightLedger:
    ledger = InflightLedger(expected_output_tokens=256, expire_after_s=10.0, remember_ended_s=5.0)
    ledger.sent(request("r"), "a", 0.0)
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


@pytest.mark.parametrize("move", [lambda led: led.routed("r", "b"), lambda led: led.accepted("r", "b", None, 1.0)])
def test_it_follows_the_request_to_the_replica_that_really_got_it(
    ledger: InflightLedger, move: Callable[[InflightLedger], object]
) -> None:
    move(ledger)
    assert ledger.counts() == {"b": PENDING}


@pytest.mark.parametrize(
    "leave",
    [
        lambda led: led.ended("r", 1.0),
        lambda led: led.released("r", "a"),
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


def test_the_end_of_an_earlier_call_elsewhere_leaves_the_retry_open(ledger: InflightLedger) -> None:
    ledger.sent(request("r"), "b", 1.0)
    ledger.released("r", "a")
    assert ledger.counts() == {"b": PENDING}


def test_messages_keep_a_long_stream_from_expiring(ledger: InflightLedger) -> None:
    ledger.accepted("r", "a", report("a"), 9.0)
    assert ledger.expire(15.0) == 0
    ledger.accepted("r", "a", report("a", number=2), 18.0)
    assert ledger.expire(27.0) == 0
    assert ledger.expire(28.1) == 1


def test_strangers_are_ignored(ledger: InflightLedger) -> None:
    ledger.accepted("?", "a", None, 1.0)
    ledger.routed("?", "b")
    ledger.released("?", "a")
    ledger.ended("?", 1.0)
    ledger.forget("z")
    assert ledger.counts() == {"a": PENDING}
