"""Which replicas fail what they are sent, though they live: passive ejection.

A replica that ends requests fast with failures of its own looks idle, so it would draw ever more of them: a black hole.
But a failure alone says little, because the request may be what fails (a poison request). So blame is by contrast:

    request fails at a, then another replica answers it    it was a's own failure
    request fails at a, then at another one too            the request is the cause: nobody's
    request is never answered (its client left, ...)       nobody's

An answer is a first token, or a good end. Answering anything makes a replica whole: all before that is forgotten.

    whole --failed--> suspect --3 failures of its own--> ejected --time over--> on trial --answered--> whole
                                                            ^--------- failed ------'

- *Suspect*: for `SUSPECT_S` after a failure, whoever's it was, it counts as busy as the mean of the others, less and
  less (as one that has just come does), so that it draws nothing by being idle. A request that failed elsewhere is sent
  to it only when all are suspect: the contrast needs a sound replica. Of the scorers only `cost_s` looks at the ramp:
  under a policy without it a suspect draws what it drew before, until it is ejected.
- *Ejected*: gets requests only when nobody else may have them. First for `FIRST_S`, then after each failure in a trial
  twice as long, at most `LONGEST_S`.
- *On trial*: one request at a time, for `TRIAL_S` at most. A trial that says nothing (its client left, it went
  elsewhere) is followed by another in `FIRST_S`.

What a client that sends nothing but poison can do: it makes replicas suspect until their next answer, which is all,
since what fails everywhere is held against nobody. Each request counts once, and never more than half of the replicas
are ejected, so that whatever goes wrong with all of them alike (a bad model, the ingress itself) leaves routing as it
is. Every process judges by what it saw itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from router.types import ReplicaView

if TYPE_CHECKING:
    from replica.metrics import Metrics

EJECT_AFTER = 3
"""Failures of its own, with no answer between."""
FIRST_S, LONGEST_S = 5.0, 60.0
SUSPECT_S = 2.0
TRIAL_S = 120.0
"""Longer than a sound replica takes to a first token. One of which nothing more is heard ends here at the latest."""
MAX_CASES = 4096
"""Failed requests that are remembered, the latest ones: a verdict comes within seconds or never."""


@dataclass(slots=True, eq=False)
class _Streak:
    """What a replica has failed since it last answered. `ejected_for_s` is 0 until it is ejected."""

    failed_at_s: float = 0.0
    num_own: int = 0
    ejected_for_s: float = 0.0
    ejected_at_s: float = 0.0
    until_s: float = 0.0
    trial: str | None = None
    trial_until_s: float = 0.0

    def is_out(self, now: float) -> bool:
        """Ejected, or on a trial that is under way."""
        is_on_trial = self.trial is not None and now < self.trial_until_s
        return self.ejected_for_s > 0 and (is_on_trial or now < self.until_s)

    def end_trial(self, request_id: str, now: float) -> None:
        """If the request is its trial."""
        if self.trial == request_id:
            self.trial, self.until_s = None, max(self.until_s, now + FIRST_S)


class _Case(NamedTuple):
    """A request that failed at one replica and was answered or failed by no other yet."""

    replica_id: str
    streak: _Streak
    failed_at_s: float


class ReplicaHealth:
    """Thread-safe. `clock` is monotonic seconds. While nothing fails it costs nothing, not even its lock.

    `num_replicas`: among how many the last decision chose; whoever decides says so.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._streaks: dict[str, _Streak] = {}
        self._cases: OrderedDict[str, _Case | None] = OrderedDict()  # None: judged
        self.num_replicas = 0
        self._metrics: Metrics | None = None
        self._model_name = ""

    def attach(self, metrics: Metrics, model_name: str) -> None:
        """Count ejections in `metrics`, which has `ROUTER_METRICS`, under `model_name`."""
        self._metrics, self._model_name = metrics, model_name
        metrics.inc("router_ejections", 0, model_name=model_name)
        self._show()

    # What the ingress saw. `request_id` is the client's request, the same at whichever replica.

    def failed(self, request_id: str, replica_id: str) -> None:
        """The replica ended the request, of which no token had come, with a failure that isn't its death."""
        with self._lock:
            now = self._clock()
            streak = self._streaks.setdefault(replica_id, _Streak())
            streak.failed_at_s = now
            if request_id not in self._cases:
                self._cases[request_id] = _Case(replica_id, streak, now)
                while len(self._cases) > MAX_CASES:
                    self._cases.popitem(last=False)
            elif (case := self._cases[request_id]) is not None and case.replica_id != replica_id:
                self._cases[request_id] = None

    def succeeded(self, request_id: str, replica_id: str) -> None:
        """The replica gave the first token of an answer to the request, or ended it well."""
        if not self._streaks:
            return
        with self._lock:
            self._drop(replica_id)
            case = self._cases.get(request_id)
            if case is not None:
                self._cases[request_id] = None
                if self._streaks.get(case.replica_id) is case.streak:  # it hasn't answered since
                    self._blame(case.streak, case.failed_at_s)

    # What the router asks and tells.

    def candidates(self, replica_ids: Sequence[str], exclude: Collection[str] = ()) -> Sequence[str]:
        """Whom to choose from: those in `exclude` (they just failed the request), ejected ones and, for a request that
        failed elsewhere, suspects are left out, each unless that leaves nobody."""
        left = _without(replica_ids, exclude)
        if not self._streaks:
            return left
        with self._lock:
            now = self._clock()
            left = _without(left, {name for name, streak in self._streaks.items() if streak.is_out(now)})
            return _without(left, self._streaks) if exclude else left

    def chosen(self, request_id: str, replica_id: str) -> None:
        """The request is sent to the replica: its trial, if it is due. To be called before anybody else chooses; and
        then `ended`, if the request is over already."""
        if not self._streaks:
            return
        with self._lock:
            now = self._clock()
            self._leave(request_id, replica_id, now)
            streak = self._streaks.get(replica_id)
            if streak is not None and streak.ejected_for_s and not streak.is_out(now):
                streak.trial, streak.trial_until_s = request_id, now + TRIAL_S

    def routed(self, request_id: str, replica_id: str) -> None:
        """The replica took the request: it tries no other one."""
        if not self._streaks:
            return
        with self._lock:
            self._leave(request_id, replica_id, self._clock())

    def ended(self, request_id: str) -> None:
        """The request that was sent is over: so is the trial that it was, if any. The verdict may still come."""
        if not self._streaks:
            return
        with self._lock:
            self._leave(request_id, None, self._clock())

    def ramp(self, views: list[ReplicaView], now: float) -> None:
        """Mark suspects among `views`, in place: how far they are on the way back to where their load puts them."""
        if not self._streaks:
            return
        with self._lock:
            for i, view in enumerate(views):
                streak = self._streaks.get(view.load.replica_id)
                if streak is not None and not streak.ejected_for_s and now - streak.failed_at_s < SUSPECT_S:
                    views[i] = view._replace(ramp=min(view.ramp, (now - streak.failed_at_s) / SUSPECT_S))

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        if self._streaks:
            with self._lock:
                self._drop(replica_id)

    def failing(self) -> set[str]:
        """The replicas that failed something and have answered nothing since."""
        with self._lock:
            return set(self._streaks)

    def ejected(self) -> set[str]:
        """Those that are ejected or on trial."""
        with self._lock:
            return self._ejected()

    def _leave(self, request_id: str, for_replica_id: str | None, now: float) -> None:
        """The request is no trial of any other replica."""
        for replica_id, streak in self._streaks.items():
            if replica_id != for_replica_id:
                streak.end_trial(request_id, now)

    def _ejected(self) -> set[str]:
        return {replica_id for replica_id, streak in self._streaks.items() if streak.ejected_for_s}

    def _drop(self, replica_id: str) -> None:
        streak = self._streaks.pop(replica_id, None)
        if streak is not None and streak.ejected_for_s:
            self._show()

    def _blame(self, streak: _Streak, failed_at_s: float) -> None:
        """A failure was the replica's own. One from before it was ejected says nothing new."""
        streak.num_own += 1
        if streak.ejected_for_s:
            if failed_at_s <= streak.ejected_at_s:
                return
        elif streak.num_own < EJECT_AFTER or len(self._ejected()) + 1 > self.num_replicas // 2:
            return
        now = streak.ejected_at_s = self._clock()
        streak.ejected_for_s = min(LONGEST_S, 2 * streak.ejected_for_s) or FIRST_S
        streak.until_s = now + streak.ejected_for_s
        if self._metrics is not None:
            self._metrics.inc("router_ejections", model_name=self._model_name)
        self._show()

    def _show(self) -> None:
        if self._metrics is not None:
            self._metrics.set("router_ejected_replicas", len(self._ejected()), model_name=self._model_name)


def _without(replica_ids: Sequence[str], out: Collection[str]) -> Sequence[str]:
    """Those not in `out`, or all when that leaves nobody."""
    if not out:
        return replica_ids
    return [replica_id for replica_id in replica_ids if replica_id not in out] or replica_ids
