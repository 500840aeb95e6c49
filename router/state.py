"""What one process knows about the replicas of one deployment: ledger, views, prefix index and policy together.

Shared by two threads: Serve runs its router on a loop of its own, the ingress's code runs on another. The router
decides (`choose`) and tells who lives; the ingress tells what came of each request (`received`, `ended`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.counters import RouterCounters
from router.decision_views import DecisionViews
from router.explain import Explanation, Scope, explained
from router.health import ReplicaHealth
from router.inflight import InflightLedger
from router.peers import PeerEstimate
from router.policy import build_policy
from router.prefix_changes import PrefixChanges
from router.prefix_index import PrefixIndex
from router.types import Decision, RouteRequest
from router.views import ReplicaViews

if TYPE_CHECKING:
    from replica.metrics import Metrics
    from replica.request import LoadReport, StreamMessage

EXPIRE_EVERY_S = 5.0


class RouterState:
    """Thread-safe. `clock` is monotonic seconds; `rng` breaks ties.

    `attach` gives it a registry that has `ROUTER_METRICS`; without one it counts nothing. `uses_prefixes` says whether
    prompts' block hashes decide anything: if not, nobody need compute them, and none are learned.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._deciding = threading.Lock()  # a decision and its entry in the ledger are one act
        self._live: frozenset[str] | None = None
        self._metrics_addresses: dict[str, str] = {}
        self._counters = RouterCounters()
        self._next_expiry_s = 0.0
        self.views = ReplicaViews()
        self.health = ReplicaHealth(clock)
        self._build(config or RouterConfig())

    def configure(self, config: RouterConfig) -> None:
        """Take these settings. Other ones than before: ledger and index begin anew; the same ones: nothing happens."""
        with self._deciding:
            if config != self.config:
                self._build(config)

    def attach(self, metrics: Metrics, model_name: str) -> None:
        """Count decisions in `metrics` under `model_name`."""
        with self._deciding:
            self._counters.attach(metrics, model_name)
            self._counters.start(self.policy)
            self.health.attach(metrics, model_name)

    # The router's side.

    def choose(self, request: RouteRequest, replica_ids: Sequence[str], exclude: Collection[str] = ()) -> Decision:
        """Rank `replica_ids` for the request and enter it in the ledger at the winner. They are to come sorted: several
        policies go by places, and `explain` looks at them in that order.

        Those in `exclude` (they just failed it) and those that fail everything (`router/health.py`) are left out,
        unless that leaves nobody. Raises `Unavailable` when there are no replicas.
        """
        started_s = time.perf_counter()
        with self._deciding:
            now = self._clock()
            self.health.num_replicas = len(replica_ids)
            candidates = self.health.candidates(replica_ids, exclude)
            self._expire(now)
            matched, views, home = self._looked_at.look(request, candidates, self.policy.shortlist, now)
            decision = self.policy.decide(request, views, now)
            winner = decision.replica_id
            self.policy.chose(winner)
            num_cached = matched.num_of(winner)
            cached_tokens = num_cached * self._looked_at.block_size_of(winner)
            # How surely other routers send it there too: to its home, or to one of those that hold as much of it.
            drawn_percent = round(100 / matched.num_holding(num_cached)) if num_cached else 0
            if winner == home:
                drawn_percent = 100
            self._peers.decided(request, cached_tokens, self.ledger.report_lag_s)
            self.health.chosen(request.request_id, winner)
            if not self.ledger.sent(request, winner, now, cached_tokens, drawn_percent):
                self.health.ended(request.request_id)  # its caller gave up while this was decided
        if self.uses_prefixes and request.block_hashes:
            self.index.learn(decision.replica_id, request.block_hashes)
        self._counters.decided(decision, time.perf_counter() - started_s, len(self.ledger))
        return decision

    def explain(self, request: RouteRequest) -> Explanation:
        """What `choose` would decide now among the replicas that run, and why. Raises `Unavailable`.

        Leaves everything as it was: the decisions that come next are those that would come without it.
        """
        running = self.replica_ids()
        with self._deciding:
            now = self._clock()
            with self._looked_at.undone(self._rng):
                # The copy goes on instead of the shortlist, which may count turns.
                candidates = self.health.candidates(running)
                matched, views, _ = self._looked_at.look(request, candidates, copy(self.policy.shortlist), now)
                scope = Scope(self.config, len(running), matched, self._peers)
                return explained(self.policy, request, views, now, scope)

    def routed(self, request: RouteRequest, replica_id: str) -> None:
        """Serve sent the request to `replica_id`, which need not be the winner (it may have been unreachable)."""
        if self.ledger.routed(request, replica_id):
            self.health.routed(request.request_id, replica_id)

    def released(self, request: RouteRequest) -> None:
        """Serve's call for this very `request` is over. A second way out of the ledger beside `ended`."""
        self.ledger.released(request)

    def retain(self, replica_ids: Collection[str], metrics_addresses: Mapping[str, str] | None = None) -> None:
        """These replicas exist; everything known of others is forgotten, and their late reports are ignored.

        `metrics_addresses`: replica -> host:port, as far as they are known.
        """
        self._metrics_addresses = dict(metrics_addresses or {})
        before, self._live = self._live, frozenset(replica_ids)
        gone = set(self.views.newest()) | set(self.ledger.counts()) | set(before or ()) | self.health.failing()
        for replica_id in gone - self._live:
            self._forget(replica_id)

    def died(self, replica_id: str) -> None:
        """The replica is dead: forget its load, its requests and its cache now, whatever the next update says."""
        if self._live is not None:
            self._live -= {replica_id}
        self._forget(replica_id)

    def replica_ids(self) -> list[str]:
        """The replicas that run, as far as the router knows; none before it has heard of any."""
        return sorted(self._live or ())

    def num_answering(self) -> int:
        """Of those that run, how many aren't known to be dead or silent."""
        return self.views.num_answering(self._live or (), self._clock())

    def metrics_addresses(self) -> list[str]:
        """host:port of the metrics of every replica that runs and has told it."""
        known = self._metrics_addresses
        return [known[replica_id] for replica_id in self.replica_ids() if replica_id in known]

    # The ingress's side.

    def received(self, request_id: str, message: StreamMessage) -> None:
        """A message of the request's stream came. The first one says that the replica has it."""
        if message.load is not None:
            self.observe(message.load)
        self.accepted(request_id, message.replica_id, message.load)
        if message.events:
            self.started(request_id)

    def started(self, request_id: str) -> None:
        """The request's first token came."""
        self.ledger.started(request_id)

    def accepted(self, request_id: str, replica_id: str, report: LoadReport | None = None) -> None:
        """The replica has the request: reports made after `report` include it. Later calls say that it is alive."""
        self.ledger.accepted(request_id, replica_id, report, self._clock())

    def observe(self, report: LoadReport) -> None:
        """A load report came, by whatever way. Those of dead replicas and lives that are over are ignored; of an old
        one only its changes of the prefix cache count."""
        if self._live is not None and report.replica_id not in self._live:
            return
        before, now = self.views.seen(report.replica_id), self._clock()
        if self.views.observe(report, now):
            self.ledger.reported(report, now)
            if before is None or before.report.epoch != report.epoch:
                self._looked_at.first_heard(report.replica_id, now)
                self.prefix_changes.forget(report.replica_id)
        elif before is None or before.report.epoch != report.epoch:
            return  # of a life that is over
        if self.uses_prefixes:
            self.prefix_changes.apply(report)

    def distrust(self, replica_id: str) -> None:
        """The replica didn't answer, or said that its engine is dead: what it reported counts as stale until it reports
        again. Those that are gone are none of it."""
        if self._live is None or replica_id in self._live:
            self.views.distrust(replica_id)

    def ended(self, request_id: str) -> None:
        """The request is over, however it ended. To be called once for every request, in a `finally`."""
        self.ledger.ended(request_id, self._clock())
        self.health.ended(request_id)
        self._counters.in_flight(len(self.ledger))

    def replica_of(self, request_id: str) -> str | None:
        """Where the request was sent, taken there or not; None before the decision and after the end."""
        return self.ledger.replica_of(request_id)

    def last_replica_of(self, request_id: str) -> str | None:
        """The same, but also when Serve's call is over and nothing was heard of it: then where it went."""
        return self.ledger.last_replica_of(request_id)

    def reports(self) -> list[LoadReport]:
        """The newest report of every running replica that has spoken."""
        return [seen.report for _, seen in sorted(self.views.newest().items())]

    def _build(self, config: RouterConfig) -> None:
        self.config = config
        self.uses_prefixes = config.uses_prefixes
        self._peers = PeerEstimate(config.num_routers)
        self.policy = build_policy(config, self._rng, self._peers)
        self.ledger = InflightLedger(
            expected_output_tokens=config.expected_output_tokens, expire_after_s=config.expire_after_s
        )
        self.index = PrefixIndex(config.max_prefix_blocks)
        self.prefix_changes = PrefixChanges(self.index)
        self._looked_at = DecisionViews(config, self.views, self.ledger, self.index, self.health, self._peers)
        self._counters.start(self.policy)

    def _forget(self, replica_id: str) -> None:
        self.views.forget(replica_id)
        self.ledger.forget(replica_id)
        self.health.forget(replica_id)
        self.prefix_changes.forget(replica_id)
        self._looked_at.forget(replica_id)

    def _expire(self, now: float) -> None:
        if now < self._next_expiry_s:
            return
        self._next_expiry_s = now + EXPIRE_EVERY_S
        self._counters.expired(self.ledger.expire(now))
