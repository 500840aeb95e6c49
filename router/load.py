"""How loaded a replica is, from its last report and this router's ledger: what all scorers look at."""

from __future__ import annotations

from router.inflight import LedgerCounts
from router.peers import Others
from router.types import ReplicaLoad, ReplicaView
from router.views import NEVER, SeenReport

STALE_SHARE = 0.5
"""A stale candidate scores this share of the worst fresh one."""

WAITING_WEIGHT = 6.0
KV_PRESSURE_FROM = 0.5

FRESH = Others()

USUAL = 1.0
"""Requests more than in the mean that a prefix may draw to a replica before that says anything of other routers: our
own are a small sample of theirs."""

OWN = 1.0
"""So much more counts a request that is our own: of those we know that they are still there."""


def load_of(
    replica_id: str, seen: SeenReport | None, own: LedgerCounts, others: Others = FRESH, computed_ratio: float = 1.0
) -> ReplicaLoad:
    """Put report and ledger together. Without a report there is only what we sent ourselves.

        cost = max(own in flight, waiting + running) + waiting * 6 * max(0, kv_usage - 0.5)

    Waiting requests weigh more the fuller the KV cache, because then they wait for blocks and not for a place. Requests
    that no report includes yet count as waiting, and their prompts as blocks held. `others`: how far reports hold, what
    they have become as far as they don't, and how many routers a prefix draws as it draws us; `computed_ratio`: share
    of waiting prompts that isn't cached (`router/peers.py`).
    """
    num_ours, pending = own.num_in_flight, own.num_pending
    settled, settled_tokens = num_ours - pending, own.prefill_tokens - own.pending_prefill_tokens
    if seen is None:
        known = (NEVER, pending, num_ours, pending, num_ours, num_ours, False, 0.0, 0.0, 1, 1)
        own_company = pending + OWN * settled
        return ReplicaLoad(replica_id, None, *known, settled, settled_tokens, own_company, own.pending_prefill_tokens)
    report = seen.report
    num_waiting = report.num_waiting + pending
    num_reported = report.num_running + report.num_waiting
    num_outstanding = max(num_ours, num_reported + pending)
    size, total = max(1, report.block_size), max(1, report.num_blocks_total)
    num_free = report.num_blocks_free + report.num_blocks_cached
    waiting_tokens, prefill_tokens = report.num_waiting_tokens, report.num_prefill_tokens
    backlog_tokens = waiting_tokens * computed_ratio + prefill_tokens
    claimed_tokens = waiting_tokens + prefill_tokens + own.pending_tokens + own.pending_output_tokens
    kv_usage_ratio = min(1.0, max(0.0, (total - num_free + own.pending_tokens / size) / total))
    pressure = WAITING_WEIGHT * max(0.0, kv_usage_ratio - KV_PRESSURE_FROM)
    trust, others_requests, others_tokens, routers, usually_drawn = others
    num_drawn, drawn_tokens = own.drawn_percent / 100, own.drawn_token_percent / 100
    if num_drawn:
        unusual = max(0.0, num_drawn - usually_drawn - USUAL) * (routers - 1.0)
        num_drawn, drawn_tokens = unusual, drawn_tokens * unusual / num_drawn
    num_settled = trust * num_reported + (1.0 - trust) * (settled + others_requests)
    backlog_tokens = trust * backlog_tokens + (1.0 - trust) * (settled_tokens + others_tokens)
    return ReplicaLoad(
        replica_id=replica_id,
        report=report,
        arrived_at_s=seen.arrived_at_s,
        num_pending=pending,
        num_in_flight=num_ours,
        num_waiting=num_waiting,
        num_outstanding=num_outstanding,
        cost=num_outstanding + num_waiting * pressure,
        would_wait=num_outstanding >= report.max_num_seqs,
        kv_usage_ratio=kv_usage_ratio,
        num_blocks_available=min(total, num_free - claimed_tokens / size),
        block_size=size,
        num_blocks_total=total,
        company=num_settled + report.num_waiting * pressure,
        backlog_tokens=backlog_tokens,
        own_company=(pending + num_drawn) * (1.0 + pressure)
        + OWN * settled
        + max(0.0, num_settled + pending + num_drawn + 1 - report.max_num_seqs),
        pending_prefill_tokens=own.pending_prefill_tokens + drawn_tokens,
    )


def stale_as_loaded(views: list[ReplicaView], scores: list[float]) -> list[float]:
    """A replica that has gone silent may be dead or drowning: it ranks below every fresh one, never as idle.

    Changes `scores` in place. When all are stale nobody is better informed than the ledger, and the scores stay as
    they are.
    """
    stale = [i for i, view in enumerate(views) if view.is_stale]
    if not stale or len(stale) == len(views):
        return scores
    bound = STALE_SHARE * min([score for view, score in zip(views, scores, strict=True) if not view.is_stale])
    for i in stale:
        scores[i] = min(scores[i], bound)
    return scores
