"""Turns engine updates and finished answers into a replica's metrics: the one writer of `REPLICA_METRICS`.

Tokens and ends are counted as clients see them (a stop string ends an answer here, not in the engine), so the books
balance: sequences asked for = sum of `request_success`, `generation_tokens` = sum of all answers' new tokens. What a
step computed is counted from its plan. Gauges follow every update, also those in which no step ran.
"""

from __future__ import annotations

from replica.engine_api import EngineUpdate
from replica.metrics import Metrics
from replica.request import FinishReason
from replica.stats import RequestTimings
from replica.stream import Answer, Stream

_GAUGES_OF_CONTENT = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "kv_cache_cached_ratio",
    "oldest_waiting_seconds",
)
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Recorder:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting_reasons: set[str] = set()
        for reason in FinishReason:
            metrics.inc("request_success", 0, finished_reason=reason.value)
        for kind in ("prefill", "decode", "recomputed"):
            metrics.inc("step_tokens", 0, kind=kind)

    def update(self, update: EngineUpdate) -> None:
        """Gauges from the newest report, counters from the step, if one ran."""
        put, load, stats = self._metrics.set, update.load, update.stats
        put("num_requests_running", load.num_running)
        put("num_requests_waiting", load.num_waiting)
        put("kv_cache_usage_perc", load.kv_usage_ratio)
        put("kv_cache_cached_ratio", load.num_blocks_cached / max(1, load.num_blocks_total))
        put("kv_cache_blocks", load.num_blocks_total)
        put("max_num_seqs", load.max_num_seqs)
        put("max_num_batched_tokens", load.max_num_batched_tokens)
        put("oldest_waiting_seconds", stats.oldest_waiting_s)
        self._waiting_reasons |= stats.num_waiting_by_reason.keys()
        for reason in self._waiting_reasons:
            put("num_requests_waiting_by_reason", stats.num_waiting_by_reason.get(reason, 0), reason=reason)
        inc = self._metrics.inc
        inc("engine_idle_seconds", stats.idle_s)
        inc("num_preemptions", stats.num_preemptions)
        inc("prefix_cache_queries", stats.prefix_query_tokens)
        inc("prefix_cache_hits", stats.prefix_hit_tokens)
        if stats.num_tokens:
            self._metrics.observe("iteration_tokens_total", stats.num_tokens)
            self._metrics.observe("iteration_seconds", stats.step_s)
            inc("step_tokens", stats.num_prefill_tokens, kind="prefill")
            inc("step_tokens", stats.num_decode_tokens, kind="decode")
            inc("step_tokens", stats.num_recomputed_tokens, kind="recomputed")

    def dead(self) -> None:
        """The engine is gone, and what it held with it. Gauges of its size and limits stay: they say what it had."""
        for name in _GAUGES_OF_CONTENT:
            self._metrics.set(name, 0)
        for reason in self._waiting_reasons:
            self._metrics.set("num_requests_waiting_by_reason", 0, reason=reason)

    def timings(self, timings: RequestTimings) -> None:
        """A sequence left the engine, for whatever reason."""
        if timings.scheduled_at_s is not None:
            self._metrics.observe("request_queue_time_seconds", timings.scheduled_at_s - timings.queued_at_s)

    def token(self, stream: Stream, answer: Answer, at_s: float) -> None:
        """A new token of an open answer existed at `at_s`."""
        self._metrics.inc("generation_tokens")
        if answer.last_token_at_s is None:
            self._metrics.observe("time_to_first_token_seconds", max(0.0, at_s - stream.arrived_at_s))
        else:
            self._metrics.observe("inter_token_latency_seconds", max(0.0, at_s - answer.last_token_at_s))
        answer.last_token_at_s = at_s
        if not stream.has_first_token:
            stream.has_first_token = True
            self._metrics.inc("prompt_tokens", len(stream.request.prompt_ids))

    def ended(self, stream: Stream, reason: FinishReason, at_s: float) -> None:
        """One answer of a stream has ended for its client."""
        self.refused(1, reason)
        if reason in _COMPLETE:
            self._metrics.observe("e2e_request_latency_seconds", max(0.0, at_s - stream.arrived_at_s))

    def refused(self, num_sequences: int, reason: FinishReason = FinishReason.REJECTED) -> None:
        """A request ended before it had a stream."""
        self._metrics.inc("request_success", num_sequences, finished_reason=reason.value)
