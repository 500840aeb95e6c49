"""`LimitedReplicas` without Ray: the real rules of limits, and failures that a test decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.limited_replicas import Limits, Revision
from replica.config import SchedulerConfig
from replica.errors import EngineDead, ErrorInfo, SettingError
from replica.model.api import ModelShape
from replica.scheduler.budgets import allowed, budgets_of, changed

SHAPE = ModelShape(num_blocks=100, block_size=4, vocab_size=50, max_model_len=400, eos_token_ids=(1,))


@dataclass
class FakeReplica:
    start: SchedulerConfig
    now: SchedulerConfig
    revision: Revision = (0, "")


class FakeLimitedReplicas:
    """`silent` replicas answer nothing. `before_set` is called with each order's replica before it is carried out.
    `calls` are (replica, method), in order."""

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.silent: set[str] = set()
        self.before_set: Callable[[str], None] = lambda _: None
        self.calls: list[tuple[str, str]] = []

    def start(self, replica_id: str, config: SchedulerConfig) -> None:
        self.replicas[replica_id] = FakeReplica(config, config)

    def ids(self) -> list[str]:
        return sorted(self.replicas)

    async def limits(self, replica_id: str) -> Limits:
        replica = self._answering(replica_id, "limits")
        now = budgets_of(replica.now)
        ranges = allowed(replica.start, now, SHAPE)
        return {
            "replica_id": replica_id,
            "revision": replica.revision,
            "start": budgets_of(replica.start),
            "now": now,
            "allowed": {name: found.as_json() for name, found in ranges.items()},
            "in_force": {name: now[name] for name in ("max_num_seqs", "max_num_batched_tokens")},
        }

    async def check_budgets(self, replica_id: str, budgets: Limits) -> ErrorInfo | None:
        replica = self._answering(replica_id, "check_budgets")
        try:
            changed(replica.start, replica.now, budgets, SHAPE)
        except SettingError as error:
            return error.info()
        return None

    async def set_budgets(self, replica_id: str, budgets: Limits, revision: Revision) -> ErrorInfo | None:
        self.before_set(replica_id)
        replica = self._answering(replica_id, "set_budgets")
        if revision <= replica.revision:
            return None
        try:
            replica.now = changed(replica.start, replica.now, budgets, SHAPE)
        except SettingError as error:
            return error.info()
        replica.revision = revision
        return None

    def _answering(self, replica_id: str, method: str) -> FakeReplica:
        self.calls.append((replica_id, method))
        if replica_id in self.silent or replica_id not in self.replicas:
            raise EngineDead(f"replica {replica_id} did not answer")
        return self.replicas[replica_id]
