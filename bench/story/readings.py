"""One sentence for each knob, made from its rows: it says what the numbers show, or that they don't show it.

Two numbers are the same when they differ by less than `SAME`, or by less than two plays of the first row do: on a
machine that does other things too, that is how far chance alone takes them. Where chance takes a number further than
`MOST_CHANCE`, nothing is read from it at all. A count must also change by more than its own scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.story.measures import Summary
from bench.story.study import KnobRow

SAME = 0.05
MOST_CHANCE = 0.15
_FULL = 0.95


@dataclass(frozen=True, slots=True)
class Reading:
    """`shown`: the rows support what the story says of this knob; else `text` says what they show instead."""

    shown: bool
    text: str


class RowComparison:
    """Compares rows number by number. `again`: the first row's second play, if there was one."""

    def __init__(self, first: Summary, again: Summary | None) -> None:
        self._first, self._again = first, again

    def same(self, name: str) -> float:
        """Up to which share of change a number counts as the same."""
        if self._again is None:
            return SAME
        once, twice = getattr(self._first, name), getattr(self._again, name)
        return max(SAME, abs(twice - once) / min(once, twice)) if min(once, twice) > 0 else SAME

    def rises(self, name: str, before: Summary, after: Summary) -> bool:
        return bool(getattr(after, name) > getattr(before, name) * (1 + self.same(name)))

    def falls(self, name: str, before: Summary, after: Summary) -> bool:
        return self.rises(name, after, before)

    def counts_rise(self, name: str, before: Summary, after: Summary) -> bool:
        """Counts scatter by about their square root, and the difference of two by that of their sum."""
        one, two = getattr(before, name), getattr(after, name)
        return self.rises(name, before, after) and two - one > math.sqrt(one + two)

    def counts_fall(self, name: str, before: Summary, after: Summary) -> bool:
        return self.counts_rise(name, after, before)

    def is_noise(self, name: str) -> bool:
        """Whether two plays of the same row differ so much that a change of this number says nothing."""
        return self.same(name) > MOST_CHANCE

    def noise(self, name: str, words: str) -> Reading:
        return Reading(False, f"not shown: two plays of one row differ by {self.same(name):.0%} in {words}")

    def chance(self, name: str) -> str:
        """What to say beside a change of this number, where chance is larger than `SAME`."""
        return f" (chance: {self.same(name):.0%})" if self.same(name) > SAME else ""


def read_max_num_seqs(rows: Sequence[KnobRow], again: Summary | None = None) -> Reading:
    """The story: beyond the point where something else is the limit, more places buy only queueing or KV pressure."""
    results, compare = [row.result for row in rows], RowComparison(rows[0].result, again)
    rate, itl_name = "output_tokens_per_s", "itl_p99_s"
    if compare.is_noise(rate):
        return compare.noise(rate, "tokens per second")
    enough = next(
        i for i, result in enumerate(results) if not any(compare.rises(rate, result, later) for later in results[i:])
    )
    at, last = results[enough], results[-1]
    if enough == len(rows) - 1:
        gain = _percent(results[-2].output_tokens_per_s, last.output_tokens_per_s)
        return Reading(False, f"not shown: the last raise, to {rows[-1].label}, still gave {gain} tokens per second")
    costs = [
        f"preemptions {at.num_preemptions} -> {last.num_preemptions}"
        * compare.counts_rise("num_preemptions", at, last),
        f"KV pool held {at.kv_mean:.0%} -> {last.kv_mean:.0%}" * compare.rises("kv_mean", at, last),
        f"ITL p99 {_ms(at.itl_p99_s, last.itl_p99_s)}"
        * (compare.rises(itl_name, at, last) and not compare.is_noise(itl_name)),
    ]
    paid = ", ".join(cost for cost in costs if cost)
    change = _percent(at.output_tokens_per_s, last.output_tokens_per_s) + compare.chance(rate)
    text = f"from {rows[enough].label} to {rows[-1].label} tokens per second change by {change}"
    if not paid:
        return Reading(False, f"not shown: {text}, and neither KV pressure nor ITL grows")
    limit = "the KV pool is the limit" if last.kv_peak >= _FULL else "places aren't the limit"
    grows = "throughput falls while pressure grows" if compare.falls(rate, at, last) else "only pressure grows"
    return Reading(True, f"{text} and {grows} ({paid}): {limit}")


def read_chunked_prefill(rows: Sequence[KnobRow], again: Summary | None = None) -> Reading:
    """The story: a long prompt taken whole owns a step; cut to what decodes leave, it can't, and pays in its own
    TTFT (p99: few prompts are long)."""
    whole, same_budget, cut = rows[0].result, rows[1].result, rows[-1].result
    compare, itl_name, ttft_name = RowComparison(whole, again), "itl_p99_s", "ttft_p99_s"
    if compare.is_noise(itl_name):
        return compare.noise(itl_name, "ITL p99")
    itl = _ms(whole.itl_p99_s, cut.itl_p99_s) + compare.chance(itl_name)
    ttft = _ms(whole.ttft_p99_s, cut.ttft_p99_s) + compare.chance(ttft_name)
    if not compare.falls(itl_name, whole, cut):
        return Reading(False, f"not shown: cutting prompts doesn't lower the ITL of running decodes (p99 {itl})")
    alone = "already at the same budget"
    if not compare.falls(itl_name, whole, same_budget):
        alone = (
            f"not by chunking alone (p99 {_ms(whole.itl_p99_s, same_budget.itl_p99_s)}), but with the smaller budget"
        )
    price = "TTFT doesn't pay for it"
    if compare.is_noise(ttft_name):
        price = "whether TTFT pays for it is not shown"
    elif compare.rises(ttft_name, whole, cut):
        price = "TTFT pays for it"
    elif compare.falls(ttft_name, whole, cut):
        price = "TTFT falls too"
    return Reading(True, f"the ITL of running decodes falls, p99 {itl}, {alone}; {price}, p99 {ttft}")


def read_watermark(rows: Sequence[KnobRow], again: Summary | None = None) -> Reading:
    """The story: blocks kept free at admission cure over-admission; they don't buy concurrency."""
    none, most, compare = rows[0].result, rows[-1].result, RowComparison(rows[0].result, again)
    if not none.num_preemptions:
        return Reading(False, "not shown: without a watermark nothing is preempted, so there is nothing to cure")
    preempted = f"preemptions {none.num_preemptions} -> {most.num_preemptions}"
    recomputed = f"recomputed tokens {none.num_recomputed_tokens} -> {most.num_recomputed_tokens}"
    if not compare.counts_fall("num_preemptions", none, most):
        return Reading(False, f"not shown: {rows[-1].label} kept free doesn't lower preemptions ({preempted})")
    width = f"batch width {none.width:.1f} -> {most.width:.1f}"
    bought = "and the batch is wider too" if compare.rises("width", none, most) else "and no concurrency is bought"
    rate = _percent(none.output_tokens_per_s, most.output_tokens_per_s) + compare.chance("output_tokens_per_s")
    return Reading(True, f"{preempted}, {recomputed}, {bought} ({width}); tokens per second change by {rate}")


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}"


def _ms(before_s: float, after_s: float) -> str:
    return f"{before_s * 1e3:.1f} -> {after_s * 1e3:.1f} ms"
