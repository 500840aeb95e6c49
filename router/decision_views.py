"""What one decision looks at: its candidates as they are now, made of ledger, views, prefix index and health.

candidates ----shortlist----> those that are scored, and the home of the prompt's beginning
           ----look again---> only those that changed since the last decision
           ----mark---------> stale, cold, suspect, home, how much of the prompt is cached there
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

from router.config import RouterConfig
from router.health import ReplicaHealth
from router.inflight import NOTHING, InflightLedger
from router.load import load_of
from router.peers import PeerEstimate
from router.prefix_index import NOBODY, Matched, PrefixIndex
from router.shortlist import SESSION_BLOCKS, OnRing, Shortlist
from router.types import ReplicaView, RouteRequest
from router.views import ReplicaViews


class DecisionViews:
    """Of one `RouterState`, which looks for one decision at a time; `first_heard` and `forget` may come meanwhile."""

    def __init__(
        self,
        config: RouterConfig,
        views: ReplicaViews,
        ledger: InflightLedger,
        index: PrefixIndex,
        health: ReplicaHealth,
        peers: PeerEstimate,
    ) -> None:
        self._config = config
        self._uses_prefixes = config.uses_prefixes
        self._has_homes = config.uses_prefixes and config.policy == "scores"
        self._views = views
        self._ledger = ledger
        self._index = index
        self._health = health
        self._peers = peers
        self._ring = OnRing()
        self._known: dict[str, ReplicaView] = {}  # as of the last decision, without matched blocks and age
        self._cold: dict[str, float] = {}  # replica first heard of lately -> when
        self._cold_order: deque[tuple[float, str]] = deque()

    def look(
        self, request: RouteRequest, replica_ids: Sequence[str], shortlist: Shortlist | None, now: float
    ) -> tuple[Matched, list[ReplicaView], str | None]:
        """Who holds how much of the prompt, the candidates of the decision, and the prompt's home, if it is looked for
        there."""
        matched = self._index.match(request.block_hashes) if self._uses_prefixes else NOBODY
        home = self._home_of(request, replica_ids, matched)
        if shortlist is not None and replica_ids:
            replica_ids = shortlist(request, replica_ids, matched)
        if home is not None and home not in replica_ids:
            replica_ids = [*replica_ids, home]
        return matched, self._see(replica_ids, matched, now, home), home

    def block_size_of(self, replica_id: str) -> int:
        """Of a replica that was just looked at."""
        return self._known[replica_id].load.block_size

    def first_heard(self, replica_id: str, now: float) -> None:
        """The first report of the replica, or of a new life of it, came."""
        if self._config.ramp_s:
            self._cold[replica_id] = now
            self._cold_order.append((now, replica_id))

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._cold.pop(replica_id, None)

    @contextmanager
    def undone(self, rng: random.Random) -> Iterator[None]:
        """What is looked at and drawn from `rng` inside is to be looked at and drawn again."""
        dice, known = rng.getstate(), self._known
        estimate = {name: copy(value) for name, value in vars(self._peers).items()}
        self._known = dict(known)
        try:
            yield
        finally:
            looked_at = self._known
            self._views.look_again({one for one in known | looked_at if known.get(one) is not looked_at.get(one)})
            self._known = known
            vars(self._peers).update(estimate)
            rng.setstate(dice)

    def _home_of(self, request: RouteRequest, replica_ids: Sequence[str], matched: Matched) -> str | None:
        """Where the session or, without one, the prompt's beginning belongs while nobody is known to hold that: there
        all routers send the first ones of a kind, so that they are found again before any report tells of them."""
        if not (self._has_homes and request.block_hashes and replica_ids):
            return None
        if matched.most >= min(SESSION_BLOCKS, len(request.block_hashes)):
            return None
        return self._ring.first(request, replica_ids, 1)[0]

    def _see(
        self, replica_ids: Sequence[str], matched: Matched, now: float, home: str | None = None
    ) -> list[ReplicaView]:
        self._refresh(replica_ids)
        views = [self._known[replica_id] for replica_id in replica_ids]
        believed_from_s = now - self._config.stale_after_s
        for i in [i for i, view in enumerate(views) if view.load.arrived_at_s < believed_from_s]:
            views[i] = ReplicaView(views[i].load, is_stale=True)
        if self._cold:
            self._ramp(views, now)
        if matched.most:
            views = [
                ReplicaView(view.load, num_matched, view.is_stale, view.ramp) if num_matched else view
                for view, num_matched in zip(views, matched.counts(replica_ids), strict=True)
            ]
        if home is not None:
            i = replica_ids.index(home)
            views[i] = views[i]._replace(is_home=True)
        self._health.ramp(views, now)
        return views

    def _ramp(self, views: list[ReplicaView], now: float) -> None:
        """How warm those are that were first heard of lately; the others are warm and are forgotten here."""
        ramp_s, cold = self._config.ramp_s, self._cold
        while self._cold_order and now - self._cold_order[0][0] >= ramp_s:
            since_s, replica_id = self._cold_order.popleft()
            if cold.get(replica_id) == since_s:
                cold.pop(replica_id, None)
        new = [i for i, view in enumerate(views) if view.load.replica_id in cold]
        if len(new) < len(views):  # beside warm ones
            for i in new:
                load, _, is_stale, _, _ = views[i]
                views[i] = ReplicaView(load, 0, is_stale, (now - cold.get(load.replica_id, now)) / ramp_s)

    def _refresh(self, replica_ids: Sequence[str]) -> None:
        """Look again at the replicas that changed since the last decision, and at those never looked at."""
        changed = self._ledger.take_changed() | self._views.take_changed()
        changed.update(set(replica_ids).difference(self._known))
        if not changed:
            return
        others, ratio = self._peers.others, self._peers.computed_ratio
        for replica_id in changed:
            seen, own = self._views.seen(replica_id), self._ledger.counts_of(replica_id)
            self._peers.look(replica_id, seen, own)
            if seen is None and own is NOTHING and replica_id not in replica_ids:
                self._known.pop(replica_id, None)
            else:
                self._known[replica_id] = ReplicaView(load_of(replica_id, seen, own, others, ratio))
