"""A question changes no decision: whatever happens to two routers alike, they decide alike, asked or not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.errors import Unavailable
from replica.metrics import Metrics
from replica.request import StreamMessage
from router.config import POLICIES, RouterConfig
from router.metrics import ROUTER_METRICS
from router.state import RouterState
from router.types import Decision
from tests.unit.router.loads import CHAIN, Clock, report, request

NUM_REPLICAS = 70
"""More than a decision looks at: the rest is drawn."""
NAMES = [f"r{i:02}" for i in range(NUM_REPLICAS)]
FEW = NAMES[:3]

which = st.integers(0, NUM_REPLICAS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), which, st.integers(0, 40)),
        st.tuples(st.just("choose"), st.integers(0, len(CHAIN)), st.just(0)),
        st.tuples(st.just("accept"), which, st.just(0)),
        st.tuples(st.just("end"), which, st.just(0)),
        st.tuples(st.just("die"), which, st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 8), st.just(0)),
    ),
    max_size=25,
)


class Router:
    """A state to which steps are done. `asked`: before each of them somebody asks for explanations."""

    def __init__(self, policy: str, names: list[str], *, asked: bool) -> None:
        self.clock, self.names, self.asked = Clock(), list(names), asked
        self.state = RouterState(RouterConfig(policy=policy), clock=self.clock, rng=random.Random(7))
        self.metrics = Metrics(ROUTER_METRICS, {})
        self.state.attach(self.metrics, "m")
        self.numbers = dict.fromkeys(names, 0)
        self.state.retain(self.names)
        self.sent: list[Decision] = []

    def do(self, action: str, number: int, amount: int) -> None:
        if self.asked:
            self.ask()
        name = self.names[number % len(self.names)]
        if action == "report":
            self.numbers[name] += 1
            self.state.observe(report(name, number=self.numbers[name], num_running=amount, num_waiting=amount // 9))
        elif action == "choose":
            wanted = request(f"q{len(self.sent)}", block_hashes=CHAIN[:number])
            explanation = self.state.explain(wanted) if self.asked else None
            self.sent.append(self.state.choose(wanted, self.names))
            if explanation is not None:
                assert explanation.decision == self.sent[-1]
        elif action == "accept" and self.sent:
            decision_number = number % len(self.sent)
            self.numbers[name] += 1
            replica_id = self.sent[decision_number].replica_id
            self.state.received(f"q{decision_number}", StreamMessage(replica_id, load=None))
        elif action == "end" and self.sent:
            self.state.ended(f"q{number % len(self.sent)}")
        elif action == "die" and len(self.names) > 1:
            self.names = [one for one in self.names if one != name]  # nobody changes a list that was given
            self.state.died(name)
        elif action == "wait":
            self.clock.now_s += number

    def ask(self) -> None:
        for hashes in ((), CHAIN):
            self.state.explain(request("nobody's", block_hashes=hashes))

    def knows(self) -> dict[str, Any]:
        """But for what is only kept to be found faster: places on the ring."""
        return {
            "peers": dict(vars(self.state._peers)),
            "ledger": (self.state.ledger.counts(), len(self.state.ledger)),
            "index": len(self.state.index),
            "health": self.state.health.num_replicas,
            "dice": self.state._rng.getstate(),
            "counted": [
                (sample.name, sample.labels, sample.value)
                for family in self.metrics.registry.collect()
                for sample in family.samples
                if "decision_seconds" not in sample.name and not sample.name.endswith("_created")
            ],
        }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("names", [FEW, NAMES], ids=["few", "many"])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_questions_in_between_change_no_decision(policy: str, names: list[str], steps: list[Any]) -> None:
    asked, unasked = Router(policy, names, asked=True), Router(policy, names, asked=False)
    for step in [*steps, ("choose", 0, 0), ("choose", len(CHAIN), 0)]:
        asked.do(*step)
        unasked.do(*step)
    assert asked.sent == unasked.sent
    assert asked.knows() == unasked.knows()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_question_without_replicas_is_refused(policy: str) -> None:
    state = RouterState(RouterConfig(policy=policy))
    with pytest.raises(Unavailable):
        state.explain(request(block_hashes=CHAIN))
