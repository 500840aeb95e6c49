"""The limits of one model's replicas: shown, changed on all of them, and kept equal.

A change is two rounds over the running replicas. First each is asked whether it would take its new limits; if one
would not, or doesn't answer, nothing changes. Then each is told. The order carries a *revision*, one more than the
newest of any replica (the ingress process breaks ties); a replica passes over what isn't newer than its own, so that
all end with the same whatever the order in which messages come. Of two ingress processes that change limits at the same
time one wins on all replicas. So each looks again at the end, and the one whose change doesn't hold says so.

The replicas hold the limits, and every ingress process remembers the newest that it saw. Whenever replicas come,
an ingress looks again and gives the newest limits to those that have older ones: a replica that Serve starts in the
place of a dead one, or adds, gets what its neighbours have. Only if it started with the same limits as they did: after
a deployment with other settings, the deployment's settings count. When the whole service starts anew, its settings
count, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.limited_replicas import LimitedReplicas, Limits, Revision
from replica.errors import BrimfulError, EngineFailure, ErrorInfo, Unavailable, error_from_info

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
NUM_WITNESSES = 3
RETRY_AFTER_S = 5.0
OVERWRITTEN = "another change came at the same time and counts instead of this one; look at the limits, then try again"


class LiveLimits:
    """Of one model, as one ingress process (`own_id`) sees them. All calls belong to one event loop."""

    def __init__(self, replicas: LimitedReplicas, own_id: str) -> None:
        self._replicas = replicas
        self._own_id = own_id
        self._changing = asyncio.Lock()
        self._newest: dict[str, Limits] = {}  # by what the replicas started with
        self._equal: frozenset[str] = frozenset()

    async def ask(self) -> tuple[list[Limits], list[str]]:
        """The limits of the replicas that answer, and the ids of those that don't."""
        return await self._ask_these(self._replicas.ids())

    async def _ask_these(self, replica_ids: Sequence[str]) -> tuple[list[Limits], list[str]]:
        answers = await asyncio.gather(*(self._ask(replica_id) for replica_id in replica_ids))
        found = [answer for answer in answers if answer is not None]
        for limits in found:
            known = self._newest.get(_start_of(limits))
            if known is None or limits["revision"] > known["revision"]:
                self._newest[_start_of(limits)] = limits
        return found, [one for one, answer in zip(replica_ids, answers, strict=True) if answer is None]

    async def change(self, changes: Mapping[str, Any], *, reset: bool) -> tuple[list[Limits], list[str]]:
        """Set these limits on all running replicas (`reset`: all others to their start values). Returns what `ask` does
        then; with the ids of replicas that took the first round and were silent since: they get it when they answer
        again.

        Raises `SettingError` when a replica refuses, `Unavailable` when there is none or one doesn't answer: nothing
        has changed then. `Unavailable` also when a change through another ingress process came over this one. What it
        overwrites later, after this one was answered, isn't told.
        """
        async with self._changing:
            found, silent = await self.ask()
            if silent or not found:
                raise _nothing_changed(silent)
            orders = {limits["replica_id"]: self._order(limits, changes, reset=reset) for limits in found}
            await self._all_take(orders)
            newest = max(limits["revision"][0] for limits in [*found, *self._newest.values()])
            revision = (newest + 1, self._own_id)
            self._equal = frozenset()
            told = await asyncio.gather(*(self._tell(one, order, revision) for one, order in orders.items()))
            missed = [replica_id for replica_id, took in zip(orders, told, strict=True) if not took]
            found, silent = await self.ask()
            if any(_is_overwritten(limits, changes, reset, revision) for limits in found):
                raise Unavailable(OVERWRITTEN, retry_after_s=RETRY_AFTER_S)
            return found, sorted({*silent, *missed})

    def _order(self, limits: Limits, changes: Mapping[str, Any], *, reset: bool) -> Limits:
        """All limits of a replica after these changes to the newest. What is asked for comes first: of two limits that
        contradict each other it is the one to be named."""
        base = limits["start"] if reset else self._newest[_start_of(limits)]["now"]
        return {**changes, **{name: value for name, value in base.items() if name not in changes}}

    async def keep_equal(self) -> None:
        """Forever: give the newest limits to replicas that have older ones."""
        while True:
            try:
                async with self._changing:
                    await self.make_equal()
            except Exception:
                logger.exception("the limits of replicas were not compared")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def make_equal(self) -> None:
        """Costs nothing while all running replicas were equal the last time. Else it asks the others, and a few of the
        equal ones: they know what changed through another ingress process."""
        replica_ids = self._replicas.ids()
        equal = self._equal.intersection(replica_ids)
        others = [replica_id for replica_id in replica_ids if replica_id not in equal]
        if not others:
            return
        found, _ = await self._ask_these([*others, *sorted(equal)[:NUM_WITNESSES]])
        told = await asyncio.gather(*(self._bring_up(limits) for limits in found))
        self._equal = equal.union(limits["replica_id"] for limits, took in zip(found, told, strict=True) if took)

    async def _bring_up(self, limits: Limits) -> bool:
        """Give a replica that has these limits the newest. False: silent, to be told again."""
        newest = self._newest[_start_of(limits)]
        if limits["revision"] == newest["revision"]:
            return True
        return await self._tell(limits["replica_id"], newest["now"], newest["revision"])

    async def _ask(self, replica_id: str) -> Limits | None:
        try:
            return await self._replicas.limits(replica_id)
        except BrimfulError as error:
            logger.warning("replica %s didn't tell its limits: %s", replica_id, error)
            return None

    async def _all_take(self, orders: Mapping[str, Limits]) -> None:
        calls = (self._replicas.check_budgets(replica_id, order) for replica_id, order in orders.items())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        silent = []
        for replica_id, answer in zip(orders, answers, strict=True):
            if isinstance(answer, ErrorInfo):
                raise error_from_info(answer)
            if isinstance(answer, EngineFailure | Unavailable):
                silent.append(replica_id)
            elif isinstance(answer, BaseException):
                raise answer
        if silent:
            raise _nothing_changed(silent)

    async def _tell(self, replica_id: str, order: Limits, revision: Revision) -> bool:
        """False: silent, to be told again. One that refuses is left as it is: it started in another way."""
        try:
            refusal = await self._replicas.set_budgets(replica_id, order, revision)
        except BrimfulError as error:
            logger.warning("replica %s didn't take its limits: %s", replica_id, error)
            return False
        if refusal is not None:
            logger.warning("replica %s keeps its limits: %s", replica_id, refusal.message)
        return True


def _start_of(limits: Limits) -> str:
    """Replicas that are equal in this started with the same limits."""
    return repr(sorted(limits["start"].items()))


def _is_overwritten(limits: Limits, changes: Mapping[str, Any], reset: bool, revision: Revision) -> bool:
    """Does a newer revision say something else than this change? One that builds on this change doesn't."""
    wanted = {**limits["start"], **changes} if reset else changes
    return limits["revision"] > revision and any(limits["now"][name] != value for name, value in wanted.items())


def _nothing_changed(silent: list[str]) -> Unavailable:
    who = f"replica {', '.join(silent)} doesn't answer" if silent else "no replica of this model is running"
    return Unavailable(f"{who}; nothing was changed", retry_after_s=RETRY_AFTER_S)
