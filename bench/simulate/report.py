"""A run for people: one table of latencies, one of how the replicas worked, one of how it went over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.simulate.outcome import LEVELS, Objectives
from bench.simulate.step_totals import Bin

ROWS_OVER_TIME = 10


def table(found: dict[str, Any], bins: list[Bin], objectives: Objectives) -> list[str]:
    """`found` as `Outcome.summary` gives it."""
    return [*_latencies(found), "", *_facts(found, objectives), "", *_over_time(bins)]


def _latencies(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'seconds':<28}{'mean':>10}" + "".join(f"{f'p{level}':>10}" for level in LEVELS)
    names = {
        "ttft_s": "time to first token",
        "itl_s": "between tokens (ITL)",
        "mean_itl_s": "ITL, mean of a request",
        "e2e_s": "end to end",
    }
    for name, label in names.items():
        row = found[name]
        yield f"{label:<28}" + "".join(_number(row[key], ">10.4f") for key in ("mean", *(f"p{x}" for x in LEVELS)))


def _facts(found: dict[str, Any], objectives: Objectives) -> Iterator[str]:
    routing = found["routing"]
    facts = [
        ("requests", f"{found['num_requests']:,} in {found['duration_s']:.1f} s: {found['num_finished']:,} finished, "
         f"{found['num_refused']:,} refused, {found['num_timed_out']:,} timed out"),
        ("throughput", f"{_number(found['throughput_requests_per_s'], '.2f')} requests/s, "
         f"{_number(found['output_tokens_per_s'], ',.0f')} output tokens/s"),
        ("goodput", f"{_number(found['goodput_requests_per_s'], '.2f')} requests/s "
         f"({_percent(found['good_share'])} of all) with TTFT <= {objectives.ttft_s:g} s, "
         f"mean ITL <= {objectives.itl_s:g} s"),
        ("steps", f"{found['num_steps']:,}, mean {_number(found['mean_step_s'], '.4f')} s; busy "
         f"{_percent(found['busy_share'])} of the time"),
        ("tokens per step", f"{_number(found['tokens_per_step'], '.1f')} "
         f"(variation {_number(found['tokens_per_step_cv'], '.2f')}), "
         f"sequences per step {_number(found['sequences_per_step'], '.1f')}"),
        ("queue", f"at most {found['max_waiting']:,} waiting at a replica; growth while requests arrive: "
         f"{_number(found['waiting_growth_per_s'], '+.3f')} requests/s, all replicas"),
        ("KV cache", f"mean {_percent(found['kv_usage_mean'])}, fullest replica {_percent(found['kv_usage_max'])}"),
        ("preemptions", f"{found['num_preemptions']:,}, at most {found['max_preemptions']} a request; "
         f"computed / useful tokens {_number(found['computed_per_useful'], '.4f')}"),
        ("routing, busiest / mean", f"requests {_number(routing['requests_max_over_mean'], '.3f')}, "
         f"output tokens {_number(routing['output_tokens_max_over_mean'], '.3f')}"),
    ]  # fmt: skip
    for name, value in facts:
        yield f"{name:<28}{value}"


def _over_time(bins: list[Bin]) -> Iterator[str]:
    """At most `ROWS_OVER_TIME` stretches of equal length."""
    if not bins:
        return
    yield f"{'virtual time, s':>16}{'running':>12}{'waiting':>12}{'tokens/s':>14}{'tokens/step':>14}{'KV blocks':>14}"
    width_s = bins[0].width_s
    end = round(bins[-1].start_s / width_s) + 1
    each = -(-end // ROWS_OVER_TIME)
    for first in range(0, end, each):
        part = [one for one in bins if first <= round(one.start_s / width_s) < first + each]
        num = min(each, end - first)
        tokens, steps = sum(one.num_tokens for one in part), sum(one.num_steps for one in part)
        means = [sum(values) / num for values in zip(*((b.running, b.waiting, b.held) for b in part), strict=True)]
        running, waiting, held = means or [0.0, 0.0, 0.0]
        per_step = tokens / steps if steps else 0.0
        yield (
            f"{first * width_s:>16.1f}{running:>12.1f}{waiting:>12.1f}{tokens / num / width_s:>14,.0f}"
            f"{per_step:>14.1f}{held:>14,.0f}"
        )


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-".rjust(10) if form.startswith(">") else "-"
    return format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
