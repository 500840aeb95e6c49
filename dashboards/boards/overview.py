"""The joint view: is there work that can't get into the current step, and what stops it?

Read from top to bottom: load (who waits), steps (how full they are), latency (what clients feel), KV cache (what else
could be the limit), outcome, the same per replica, then the way in: HTTP and routing. No panel
alone is evidence; the rows are.
"""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row, Variable
from dashboards.promql import Scope, ratio

SCOPE = Scope(where=('model_name=~"$model_name"', 'replica=~"$replica"'), window="$__rate_interval")
EDGE = Scope(where=(), window="$__rate_interval")
"""Ingress processes serve all models; their series have neither a model nor a replica."""
ROUTING = Scope(where=('model_name=~"$model_name"',), window="$__rate_interval")

VARIABLES = (
    Variable("model_name", "brimful_max_num_seqs", "model_name"),
    Variable("replica", 'brimful_max_num_seqs{model_name=~"$model_name"}', "replica"),
)
"""Both come from a gauge that only brimful's replicas have: `model_name` alone is a label of other exporters, too."""


def board() -> Board:
    return Board(
        uid="brimful-overview",
        title="brimful overview",
        description="Load, steps, latency and KV cache together: is the batch narrow while requests wait?",
        variables=VARIABLES,
        rows=(_load(), _steps(), _latency(), _kv_cache(), _outcome(), _per_replica(), _edge(), _routing()),
    )


def _load() -> Row:
    running = SCOPE.total("num_requests_running")
    waiting = SCOPE.total("num_requests_waiting")
    seats = SCOPE.total("max_num_seqs")
    by_reason = SCOPE.total("num_requests_waiting_by_reason", by=("reason",))
    return Row(
        "Load",
        (
            Panel(
                "Running and waiting",
                "Waiting grows while running stays below the limit: work can't get into the step. Look at the reasons.",
                (Query(running, "running"), Query(waiting, "waiting"), Query(seats, "limit: max_num_seqs")),
                "short",
            ),
            Panel(
                "Waiting, by what stops them",
                "budget: tokens a step; seqs: sequences a step; blocks: KV cache; long_prefill: long prompts.",
                (Query(by_reason, "{{reason}}"),),
                "short",
                stacked=True,
            ),
            Panel(
                "Oldest waiting",
                "Rises steadily when arrivals exceed what leaves.",
                (Query(SCOPE.peak("oldest_waiting_seconds"), "oldest"),),
                "s",
                width=5,
            ),
            Panel(
                "Replicas",
                "Replicas that Prometheus sees.",
                (Query(SCOPE.count("max_num_seqs"), "replicas"),),
                "short",
                kind="stat",
                width=3,
            ),
        ),
    )


def _steps() -> Row:
    tokens = SCOPE.average("iteration_tokens_total")
    wide = SCOPE.quantile(0.95, "iteration_tokens_total")
    budget = SCOPE.mean("max_num_batched_tokens")
    kinds = SCOPE.per_second("step_tokens", by=("kind",))
    return Row(
        "Steps",
        (
            Panel(
                "Tokens per step",
                "Far below the budget while requests wait: the batch is narrow. At the budget: it is the limit.",
                (Query(tokens, "average"), Query(wide, "p95"), Query(budget, "limit: max_num_batched_tokens")),
                "short",
            ),
            Panel(
                "Tokens computed per second",
                "Recomputed tokens are work that preemptions threw away.",
                (Query(kinds, "{{kind}}"),),
                "short",
                stacked=True,
            ),
            Panel(
                "Step duration",
                "A step lasts as long as a running sequence waits for its next token.",
                _quantiles("iteration_seconds"),
                "s",
                width=5,
            ),
            Panel(
                "Engine idle",
                "Share of time with nothing to compute. High: too few arrivals, nothing to repair.",
                (Query(SCOPE.share_of_time("engine_idle_seconds"), "idle"),),
                "percentunit",
                width=3,
                maximum=1,
            ),
        ),
    )


def _latency() -> Row:
    panels = (
        ("Queue time", "From arrival to the first chunk.", "request_queue_time_seconds"),
        ("Time to first token", "Queue time plus prefill.", "time_to_first_token_seconds"),
        (
            "Inter-token latency",
            "Grows with the width of a step and with prefill in it.",
            "inter_token_latency_seconds",
        ),
        ("Whole request", "From arrival to the last token.", "e2e_request_latency_seconds"),
    )
    return Row("Latency", tuple(Panel(title, text, _quantiles(name), "s", width=6) for title, text, name in panels))


def _kv_cache() -> Row:
    hits = ratio(SCOPE.per_second("prefix_cache_hits"), SCOPE.per_second("prefix_cache_queries"))
    usage = (
        Query(SCOPE.mean("kv_cache_usage_perc"), "average of replicas"),
        Query(SCOPE.peak("kv_cache_usage_perc"), "fullest replica"),
    )
    return Row(
        "KV cache",
        (
            Panel(
                "KV cache held",
                "At its limit together with preemptions: more concurrency is beyond these replicas.",
                usage,
                "percentunit",
                width=6,
                maximum=1,
            ),
            Panel(
                "Free blocks that keep a prefix",
                "Free to take; worth keeping as long as prefixes hit.",
                (Query(SCOPE.mean("kv_cache_cached_ratio"), "cached"),),
                "percentunit",
                width=6,
                maximum=1,
            ),
            Panel(
                "Prefix hit ratio",
                "Prompt tokens found in the prefix cache, of those looked up.",
                (Query(hits, "hits"),),
                "percentunit",
                width=6,
                maximum=1,
            ),
            Panel(
                "Preemptions",
                "Sequences per second that gave their blocks back and are recomputed.",
                (Query(SCOPE.per_second("num_preemptions"), "preemptions"),),
                "ops",
                width=6,
            ),
        ),
    )


def _outcome() -> Row:
    ended = SCOPE.per_second("request_success", by=("finished_reason",))
    tokens = (
        Query(SCOPE.per_second("prompt_tokens"), "prompt"),
        Query(SCOPE.per_second("generation_tokens"), "generated"),
    )
    return Row(
        "Outcome",
        (
            Panel(
                "Sequences ended, by reason",
                "stop and length are answers; abort: the caller left; error, rejected, timeout: we failed them.",
                (Query(ended, "{{finished_reason}}"),),
                "ops",
                width=12,
                stacked=True,
            ),
            Panel("Tokens per second", "What clients sent and got.", tokens, "short", width=12),
        ),
    )


def _per_replica() -> Row:
    by = ("replica",)
    step = ratio(SCOPE.average("iteration_tokens_total", by=by), SCOPE.mean("max_num_batched_tokens", by=by))
    panels = (
        ("Running", SCOPE.total("num_requests_running", by=by), "short"),
        ("Waiting", SCOPE.total("num_requests_waiting", by=by), "short"),
        ("Step fill: tokens of the budget", step, "percentunit"),
        ("KV cache held", SCOPE.peak("kv_cache_usage_perc", by=by), "percentunit"),
        ("Preemptions", SCOPE.per_second("num_preemptions", by=by), "ops"),
        ("Generated tokens per second", SCOPE.per_second("generation_tokens", by=by), "short"),
    )
    text = "One line a replica: replicas that differ for long point at the router or at one bad machine."
    return Row("Per replica", tuple(Panel(t, text, (Query(expr, "{{replica}}"),), unit) for t, expr, unit in panels))


def _edge() -> Row:
    lost = (
        Query(EDGE.per_second("http_client_disconnects"), "client left"),
        Query(EDGE.per_second("http_stream_errors"), "error within a stream"),
        Query(EDGE.per_second("http_continuations"), "replica lost, continued at another"),
    )
    return Row(
        "HTTP (all models)",
        (
            Panel(
                "HTTP answers, by status",
                "503: refused for load. 499: the client left. Other 5xx: our fault.",
                (Query(EDGE.per_second("http_requests", by=("status",)), "{{status}}"),),
                "ops",
                width=6,
                stacked=True,
            ),
            Panel(
                "Refused before any work",
                "Admission: what a refusal was decided by.",
                (Query(EDGE.per_second("admission_rejections", by=("reason",)), "{{reason}}"),),
                "ops",
                width=6,
                stacked=True,
            ),
            Panel(
                "In flight",
                "Generation requests in ingress processes. Far above running plus waiting: they hang in between.",
                (Query(EDGE.total("http_requests_in_flight"), "requests"),),
                "short",
                width=6,
            ),
            Panel(
                "Streams cut short",
                "After the answer had begun, so the status says 200. What was continued reached its client.",
                lost,
                "ops",
                width=6,
            ),
        ),
    )


def _routing() -> Row:
    return Row(
        "Routing",
        (
            Panel(
                "Decisions",
                "What decided for the chosen replica; router/policy.py explains the reasons.",
                (Query(ROUTING.per_second("router_decisions", by=("reason",)), "{{reason}}"),),
                "ops",
                width=6,
                stacked=True,
            ),
            Panel(
                "Age of load reports",
                "At the decision. Old reports: the router flies on its own ledger.",
                _quantiles("router_report_age_seconds", ROUTING),
                "s",
                width=6,
            ),
            Panel("Decision time", "Of one decision.", _quantiles("router_decision_seconds", ROUTING), "s", width=6),
            Panel(
                "Sent and not ended",
                "Requests on their way or in replicas, by the routers' own ledgers.",
                (Query(ROUTING.total("router_requests_in_flight", by=("model_name",)), "{{model_name}}"),),
                "short",
                width=6,
            ),
        ),
    )


def _quantiles(name: str, scope: Scope = SCOPE) -> tuple[Query, ...]:
    return Query(scope.quantile(0.5, name), "p50"), Query(scope.quantile(0.95, name), "p95")
