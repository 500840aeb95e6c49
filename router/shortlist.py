"""Which replicas a decision looks at: all of a few, some of many.

    FavouritesAndSample   up to 64 all; of more, 40: those that hold most of the prompt and a random sample
    TwoDrawn              two at random
    InTurn                the next ones after those of the last decision
    OnRing                the session's place on a ring of replicas, and who follows

Not thread-safe: `RouterState` decides one request at a time.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from router.prefix_index import Matched
from router.types import RouteRequest

ALL_UP_TO = 64
MAX_SCORED = 40
MAX_FAVOURITES = 8
"""Of more than `ALL_UP_TO` replicas a decision looks at `MAX_SCORED`: so many prefix favourites and a random sample of
the rest. The best of 32 drawn is about as good as the best of 1,000, and a decision costs the same however many there
are."""

NUM_LISTED = 8
"""How many an ordered shortlist names: enough for the next when the first ones don't take the request."""

POINTS = 64
"""Places of each replica on the ring: the more, the more even their shares (64: within some 12 %)."""

SESSION_BLOCKS = 4
"""A request that names no session belongs to all that begin with the same so many blocks."""


class Shortlist(Protocol):
    """Candidates of one decision out of `replica_ids` (at least one). `matched`: replica -> cached leading blocks."""

    def __call__(self, request: RouteRequest, replica_ids: Sequence[str], matched: Matched, /) -> Sequence[str]: ...


class SetOf:
    """The set of a list's replicas, made anew when another list is given. Nobody changes a list that was given."""

    def __init__(self) -> None:
        self._list: Sequence[str] = ()
        self._set: frozenset[str] = frozenset()

    def __call__(self, replica_ids: Sequence[str]) -> frozenset[str]:
        if replica_ids is not self._list:
            self._list, self._set = replica_ids, frozenset(replica_ids)
        return self._set


class FavouritesAndSample:
    """`rng` draws the sample, and which favourites among equals."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._allowed = SetOf()

    def __call__(self, _request: RouteRequest, replica_ids: Sequence[str], matched: Matched) -> Sequence[str]:
        num, draw = len(replica_ids), self._rng.random
        if num <= ALL_UP_TO:
            return replica_ids
        favourites: list[str] = []
        if matched.most:
            allowed = self._allowed(replica_ids)
            longest = matched.longest(start=int(draw() * num))
            favourites = list(islice((one for one in longest if one in allowed), MAX_FAVOURITES))
        drawn = [
            replica_ids[int(draw() * num)] for _ in range(MAX_SCORED - len(favourites))
        ]  # one or two of them twice
        return list(dict.fromkeys([*favourites, *drawn]))  # in an order that no process's `hash` decides


class TwoDrawn:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, _request: RouteRequest, replica_ids: Sequence[str], _matched: Matched) -> Sequence[str]:
        return self._rng.sample(replica_ids, 2) if len(replica_ids) > 2 else replica_ids


class InTurn:
    """Begins anywhere, so that routers of many processes don't go round in step."""

    def __init__(self, rng: random.Random) -> None:
        self._next = rng.randrange(1 << 30)

    def __call__(self, _request: RouteRequest, replica_ids: Sequence[str], _matched: Matched) -> Sequence[str]:
        num = len(replica_ids)
        first = self._next % num
        self._next += 1
        return [replica_ids[(first + i) % num] for i in range(min(num, NUM_LISTED))]


class OnRing:
    """Consistent hashing: a replica that comes or goes moves only the sessions near its places."""

    def __init__(self) -> None:
        self._allowed = SetOf()
        self._on_ring: frozenset[str] = frozenset()
        self._fits: frozenset[str] = frozenset()  # the last set that the ring serves
        self._places: list[int] = []
        self._owners: list[str] = []

    def __call__(self, request: RouteRequest, replica_ids: Sequence[str], _matched: Matched) -> Sequence[str]:
        return self.first(request, replica_ids, NUM_LISTED)

    def first(self, request: RouteRequest, replica_ids: Sequence[str], num: int) -> list[str]:
        """The `num` replicas (or all) that come first from the session's place on."""
        allowed = self._allowed(replica_ids)
        if allowed is not self._fits:
            if not self._on_ring >= allowed or len(self._on_ring) > 2 * len(allowed):
                self._build(allowed)
            self._fits = allowed
        place = bisect(self._places, _hash(session_of(request)))
        num_wanted = min(len(allowed), num)
        listed: dict[str, None] = {}
        while len(listed) < num_wanted:
            owner = self._owners[place % len(self._owners)]
            if owner in allowed:
                listed[owner] = None
            place += 1
        return list(listed)

    def _build(self, replica_ids: frozenset[str]) -> None:
        ring = sorted((_hash(f"{one}/{i}".encode()), one) for one in replica_ids for i in range(POINTS))
        self._on_ring = replica_ids
        self._places = [place for place, _ in ring]
        self._owners = [owner for _, owner in ring]


def session_by(request: RouteRequest) -> str:
    """What `session_of` goes by: the `session` that the request names, its `prompt`, or the `request` itself."""
    return "session" if request.session else "prompt" if request.block_hashes else "request"


def session_of(request: RouteRequest) -> bytes:
    """The session that the request names, or what its prompt begins with, or itself alone."""
    if request.session:
        return request.session.encode()
    if request.block_hashes:
        return request.block_hashes[min(len(request.block_hashes), SESSION_BLOCKS) - 1]
    return request.request_id.encode()


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
