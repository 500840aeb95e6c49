"""The ledger and the views against a naive model, under any interleaving of what can happen.

The model keeps the whole history of believed reports and answers from the definition: an entry pends while no report
was believed since that was made after its acceptance. Reports arrive late, twice and out of order; replicas die and
come back, and their engines begin new lives (epochs). In the end every request ends, and nothing may be left.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.request import LoadReport
from router.inflight import InflightLedger, LedgerCounts
from router.types import RouteRequest
from router.views import ReplicaViews
from tests.unit.router.loads import report, request

NAMES = "abc"
REPLICAS = st.sampled_from(NAMES)
REQUESTS = st.sampled_from([f"r{i}" for i in range(6)])
MAX_LIVES = 5


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.views = InflightLedger(remember_ended_s=0.5), ReplicaViews()
        self.now = 0.0
        self.made: dict[str, list[LoadReport]] = {name: [report(name, epoch="0", number=0)] for name in NAMES}
        self.believed: dict[str, list[LoadReport]] = {name: [] for name in NAMES}
        self.open: dict[str, str] = {}
        self.tries: dict[str, list[RouteRequest]] = {}  # of each request, the present one last
        self.tokens: dict[str, int] = {}
        self.started: set[str] = set()
        self.accepted: dict[str, tuple[LoadReport | None, int]] = {}  # report on the message; believed by then

    def pends(self, request_id: str) -> bool:
        if request_id not in self.accepted:
            return True
        on_message, num_believed = self.accepted[request_id]
        believed = self.believed[self.open[request_id]]
        if on_message is None:
            return len(believed) == num_believed
        since = believed[max(0, num_believed - 1) :]
        return not any(r.epoch != on_message.epoch or r.number > on_message.number for r in since)

    def to_compute(self, request_id: str) -> int:
        return 0 if request_id in self.started else self.tokens[request_id]

    def close(self, request_id: str) -> None:
        self.open.pop(request_id, None)
        self.started.discard(request_id)
        self.accepted.pop(request_id, None)

    @rule(request_id=REQUESTS, replica_id=REPLICAS, tokens=st.integers(1, 9))
    def sent(self, request_id: str, replica_id: str, tokens: int) -> None:
        self.now += 1.0  # past the memory of ended ids, so that ids are used again
        wanted = request(request_id, num_prompt_tokens=tokens, max_tokens=2)
        assert self.ledger.sent(wanted, replica_id, self.now)
        self.tries.setdefault(request_id, []).append(wanted)
        self.close(request_id)
        self.open[request_id], self.tokens[request_id] = replica_id, tokens

    @rule(replica_id=REPLICAS, new_life=st.booleans())
    def report_is_made(self, replica_id: str, new_life: bool) -> None:
        last = self.made[replica_id][-1]
        life = min(MAX_LIVES, int(last.epoch) + new_life)
        number = last.number + 1 if str(life) == last.epoch else 0
        self.made[replica_id].append(report(replica_id, epoch=str(life), number=number))

    @rule(replica_id=REPLICAS, data=st.data())
    def report_arrives(self, replica_id: str, data: st.DataObject) -> None:
        arrived = data.draw(st.sampled_from(self.made[replica_id]))
        believed = self.believed[replica_id]
        if not believed:
            news = True
        elif arrived.epoch == believed[-1].epoch:
            news = arrived.number > believed[-1].number
        else:
            news = arrived.epoch not in {r.epoch for r in believed}
        assert self.views.observe(arrived, self.now) == news
        if news:
            believed.append(arrived)
            self.ledger.reported(arrived, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), with_report=st.booleans())
    def accepted_first_message(self, data: st.DataObject, with_report: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        replica_id = self.open[request_id]
        on_message = data.draw(st.sampled_from(self.made[replica_id])) if with_report else None
        self.ledger.accepted(request_id, replica_id, on_message, self.now)
        self.accepted.setdefault(request_id, (on_message, len(self.believed[replica_id])))

    @rule(request_id=REQUESTS)
    def first_token(self, request_id: str) -> None:
        self.ledger.started(request_id)
        if request_id in self.open:
            self.started.add(request_id)

    def try_of(self, data: st.DataObject) -> tuple[RouteRequest, bool]:
        """Any try, also an earlier one, and whether it is open."""
        request_id = data.draw(st.sampled_from(sorted(self.tries)))
        tries = self.tries[request_id]
        tried = data.draw(st.sampled_from(tries))
        return tried, tried is tries[-1] and request_id in self.open

    @precondition(lambda self: self.tries)
    @rule(replica_id=REPLICAS, data=st.data())
    def routed(self, replica_id: str, data: st.DataObject) -> None:
        tried, is_open = self.try_of(data)
        request_id = tried.request_id
        assert self.ledger.routed(tried, replica_id) == is_open
        if is_open and self.open[request_id] != replica_id:
            self.open[request_id] = replica_id
            self.started.discard(request_id)
            self.accepted.pop(request_id, None)

    @precondition(lambda self: self.tries)
    @rule(data=st.data())
    def released(self, data: st.DataObject) -> None:
        tried, is_open = self.try_of(data)
        self.ledger.released(tried)
        if is_open:
            self.close(tried.request_id)

    @rule(request_id=REQUESTS)
    def ended(self, request_id: str) -> None:
        self.ledger.ended(request_id, self.now)
        self.close(request_id)

    @rule(replica_id=REPLICAS)
    def replica_dies(self, replica_id: str) -> None:
        self.views.forget(replica_id)
        self.ledger.forget(replica_id)
        self.believed[replica_id] = []
        for request_id in [r for r, at in self.open.items() if at == replica_id]:
            self.close(request_id)

    @invariant()
    def ledger_equals_the_model(self) -> None:
        expected: dict[str, LedgerCounts] = {}
        for request_id, replica_id in self.open.items():
            pends, old = self.pends(request_id), expected.get(replica_id, LedgerCounts())
            expected[replica_id] = LedgerCounts(
                old.num_in_flight + 1,
                old.num_pending + pends,
                old.pending_tokens + pends * self.tokens[request_id],
                old.pending_output_tokens + pends * 2,
                old.prefill_tokens + self.to_compute(request_id),
                old.pending_prefill_tokens + pends * self.to_compute(request_id),
            )
        assert self.ledger.counts() == expected

    @invariant()
    def views_equal_the_model(self) -> None:
        newest = {name: seen.report for name, seen in self.views.newest().items()}
        assert newest == {name: believed[-1] for name, believed in self.believed.items() if believed}

    def teardown(self) -> None:
        for request_id in sorted(self.tries):
            self.ledger.ended(request_id, self.now)
        assert len(self.ledger) == 0
        assert self.ledger.counts() == {}
        assert self.ledger._accepted == self.ledger._over == {}


TestLedgerAndViews = LedgerMachine.TestCase
