"""The health of replicas against a naive model, under any interleaving of failures, answers, trials and time.

The model keeps the whole history and answers from the definitions: a failure is a replica's own when the first thing
that another replica said of the request is an answer; those since the replica's last answer count.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.health import EJECT_AFTER, FIRST_S, LONGEST_S, TRIAL_S, ReplicaHealth

NAMES = "abcd"
REPLICAS = st.sampled_from(NAMES)
REQUESTS = st.sampled_from([f"r{i}" for i in range(8)])


@dataclass(frozen=True)
class Said:
    """One thing that a replica said of a request."""

    at_s: float
    request_id: str
    replica_id: str
    failed: bool


class HealthMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.health = ReplicaHealth(lambda: self.now)
        self.health.num_replicas = len(NAMES)
        self.history: list[Said] = []
        self.ejections: dict[str, list[float]] = {}  # replica -> when, since its last answer
        self.until: dict[str, float] = {}
        self.trials: dict[str, tuple[str, float]] = {}  # replica -> the request that tries it, until when

    def own_failures(self, replica_id: str) -> list[float]:
        """When those failures were that are the replica's own and no older than its last answer."""
        answers = [i for i, said in enumerate(self.history) if said.replica_id == replica_id and not said.failed]
        since = max(answers, default=-1)
        found = []
        for i, said in enumerate(self.history):
            if i <= since or not said.failed or said.replica_id != replica_id:
                continue
            if all(other.request_id != said.request_id or not other.failed for other in self.history[:i]):
                others = [
                    other
                    for other in self.history[i + 1 :]
                    if other.request_id == said.request_id and not (other.failed and other.replica_id == replica_id)
                ]
                if others and not others[0].failed and others[0].replica_id != replica_id:
                    found.append(said.at_s)
        return found

    def say(self, request_id: str, replica_id: str, failed: bool) -> None:
        self.now += 0.25
        before = {name: len(self.own_failures(name)) for name in NAMES}
        self.history.append(Said(self.now, request_id, replica_id, failed))
        if not failed:
            self.ejections.pop(replica_id, None)
            self.until.pop(replica_id, None)
            self.trials.pop(replica_id, None)
        for name in NAMES:
            own = self.own_failures(name)
            if len(own) <= before[name]:
                continue
            first = next(said for said in self.history if said.request_id == request_id and said.failed)
            earlier = self.ejections.get(name)
            if earlier is None and (len(own) < EJECT_AFTER or len(self.ejections) == len(NAMES) // 2):
                continue
            if earlier is not None and first.at_s <= earlier[-1]:
                continue
            times = self.ejections.setdefault(name, [])
            times.append(self.now)
            self.until[name] = self.now + min(LONGEST_S, FIRST_S * 2 ** (len(times) - 1))

    @rule(request_id=REQUESTS, replica_id=REPLICAS)
    def failed(self, request_id: str, replica_id: str) -> None:
        self.say(request_id, replica_id, failed=True)
        self.health.failed(request_id, replica_id)

    @rule(request_id=REQUESTS, replica_id=REPLICAS)
    def succeeded(self, request_id: str, replica_id: str) -> None:
        self.say(request_id, replica_id, failed=False)
        self.health.succeeded(request_id, replica_id)

    @rule(replica_id=REPLICAS, number=st.integers(0, 10**6))
    def fails_what_another_answers(self, replica_id: str, number: int) -> None:
        """What seldom comes by chance."""
        other = NAMES[(NAMES.index(replica_id) + 1) % len(NAMES)]
        request_ids = [f"{number}/{len(self.history)}/{i}" for i in range(EJECT_AFTER + 1)]
        for request_id in request_ids:
            self.failed(request_id, replica_id)
        for request_id in request_ids:
            self.succeeded(request_id, other)

    @rule(request_id=REQUESTS, replica_id=REPLICAS)
    def chosen(self, request_id: str, replica_id: str) -> None:
        self.leave(request_id, replica_id)
        if replica_id in self.ejections and not self.is_out(replica_id):
            self.trials[replica_id] = request_id, self.now + TRIAL_S
        self.health.chosen(request_id, replica_id)

    @rule(request_id=REQUESTS, replica_id=REPLICAS)
    def routed(self, request_id: str, replica_id: str) -> None:
        self.leave(request_id, replica_id)
        self.health.routed(request_id, replica_id)

    @rule(request_id=REQUESTS)
    def ended(self, request_id: str) -> None:
        self.leave(request_id, None)
        self.health.ended(request_id)

    def leave(self, request_id: str, for_replica_id: str | None) -> None:
        for name in [
            name for name, (trial, _) in self.trials.items() if trial == request_id and name != for_replica_id
        ]:
            del self.trials[name]
            self.until[name] = max(self.until[name], self.now + FIRST_S)

    @rule(passed_s=st.sampled_from([0.5, FIRST_S, LONGEST_S, TRIAL_S]))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s

    def is_out(self, name: str) -> bool:
        return name in self.ejections and self.now < max(self.until[name], self.trials.get(name, ("", 0.0))[1])

    @invariant()
    def who_is_out_follows_from_the_history(self) -> None:
        assert self.health.ejected() == set(self.ejections)
        assert list(self.health.candidates(NAMES)) == [name for name in NAMES if not self.is_out(name)]


TestHealth = HealthMachine.TestCase
TestHealth.settings = settings(max_examples=100, stateful_step_count=50)  # the model looks at its whole history
