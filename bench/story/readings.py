"""One sentence for each knob, made from its rows: it says what the numbers show, or that they don't show it.

Two numbers are the same when they differ by less than `SAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.story.knobs import KnobRow

SAME = 0.05
_FULL = 0.95


@dataclass(frozen=True, slots=True)
class Reading:
    """`shown`: the rows support what the story says of this knob; else `text` says what they show instead."""

    shown: bool
    text: str


def read_max_num_seqs(rows: Sequence[KnobRow]) -> Reading:
    """The story: beyond the point where something else is the limit, more places buy only queueing or KV pressure."""
    rates = [row.result.output_tokens_per_s for row in rows]
    enough = next(i for i, rate in enumerate(rates) if max(rates[i:]) <= rate * (1 + SAME))
    at, last = rows[enough].result, rows[-1].result
    if enough == len(rows) - 1:
        gain = _percent(rates[-2], rates[-1])
        return Reading(False, f"not shown: the last raise, to {rows[-1].label}, still gave {gain} tokens per second")
    costs = [
        f"preemptions {at.num_preemptions} -> {last.num_preemptions}" * (last.num_preemptions > at.num_preemptions),
        f"KV pool held {at.kv_mean:.0%} -> {last.kv_mean:.0%}" * (last.kv_mean > at.kv_mean * (1 + SAME)),
        f"ITL p99 {_ms(at.itl_p99_s, last.itl_p99_s)}" * (last.itl_p99_s > at.itl_p99_s * (1 + SAME)),
    ]
    paid = ", ".join(cost for cost in costs if cost)
    change = _percent(rates[enough], rates[-1])
    text = f"from {rows[enough].label} to {rows[-1].label} tokens per second change by {change}"
    if not paid:
        return Reading(False, f"not shown: {text}, and neither KV pressure nor ITL grows")
    limit = "the KV pool is the limit" if last.kv_peak >= _FULL else "places aren't the limit"
    return Reading(True, f"{text} and only pressure grows ({paid}): {limit}")


def read_chunked_prefill(rows: Sequence[KnobRow]) -> Reading:
    """The story: a long prompt taken whole owns a step; cut to what decodes leave, it can't, and pays in its TTFT."""
    whole, cut = rows[0].result, rows[-1].result
    itl, ttft = _ms(whole.itl_p99_s, cut.itl_p99_s), _ms(whole.ttft_p50_s, cut.ttft_p50_s)
    if cut.itl_p99_s > whole.itl_p99_s * (1 - SAME):
        return Reading(False, f"not shown: cutting prompts doesn't lower the ITL of running decodes (p99 {itl})")
    same_budget = rows[1].result
    alone = "already at the same budget"
    if same_budget.itl_p99_s > whole.itl_p99_s * (1 - SAME):
        alone = (
            f"not by chunking alone (p99 {_ms(whole.itl_p99_s, same_budget.itl_p99_s)}), but with the smaller budget"
        )
    price = "TTFT doesn't pay for it"
    if cut.ttft_p50_s > whole.ttft_p50_s * (1 + SAME):
        price = "TTFT pays for it"
    elif cut.ttft_p50_s < whole.ttft_p50_s * (1 - SAME):
        price = "TTFT falls too"
    return Reading(True, f"the ITL of running decodes falls, p99 {itl}, {alone}; {price}, p50 {ttft}")


def read_watermark(rows: Sequence[KnobRow]) -> Reading:
    """The story: blocks kept free at admission cure over-admission; they don't buy concurrency."""
    none, most = rows[0].result, rows[-1].result
    if not none.num_preemptions:
        return Reading(False, "not shown: without a watermark nothing is preempted, so there is nothing to cure")
    preempted = f"preemptions {none.num_preemptions} -> {most.num_preemptions}"
    again = f"recomputed tokens {none.num_recomputed_tokens} -> {most.num_recomputed_tokens}"
    if most.num_preemptions > none.num_preemptions * (1 - SAME):
        return Reading(False, f"not shown: {rows[-1].label} kept free doesn't lower preemptions ({preempted})")
    width = f"batch width {none.width:.1f} -> {most.width:.1f}"
    bought = "and no concurrency is bought" if most.width <= none.width * (1 + SAME) else "and the batch is wider too"
    rate = _percent(none.output_tokens_per_s, most.output_tokens_per_s)
    return Reading(True, f"{preempted}, {again}, {bought} ({width}); tokens per second change by {rate}")


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}"


def _ms(before_s: float, after_s: float) -> str:
    return f"{before_s * 1e3:.1f} -> {after_s * 1e3:.1f} ms"
