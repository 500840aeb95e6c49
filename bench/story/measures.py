"""Numbers and pictures of one replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.story.replay import Replay

_BARS = "▁▂▃▄▅▆▇█"


class Window(NamedTuple):
    """The steps that count, and what left the engine in them. `seconds`: as they were timed; `undisturbed_s`: each step
    at the lower quartile of this side's steps with the same work, because what else a machine does only makes steps
    longer, and may hit most of them.
    """

    num_steps: int
    num_output_tokens: int
    seconds: float
    undisturbed_s: float


def without_drain(replay: Replay, *, static: bool) -> Window:
    """Of a load that was all present: the steps after which somebody still waits.

    A fixed batch that nobody waits behind still runs to its own end as every other does, so of fixed batches all steps
    count, provided the last batch was full too.
    """
    steps = replay.steps
    counting = [i for i, waiting in enumerate(steps.waiting) if static or waiting > 0]
    work = list(zip(steps.tokens, steps.width, strict=True))
    timed: dict[tuple[int, int], list[float]] = {}
    for i in counting:
        timed.setdefault(work[i], []).append(steps.seconds[i])
    return Window(
        num_steps=len(counting),
        num_output_tokens=sum(steps.width[i] for i in counting),
        seconds=sum(steps.seconds[i] for i in counting),
        undisturbed_s=sum(quantile(sorted(seconds), 0.25) * len(seconds) for seconds in timed.values()),
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole replay, drain included, in one line. `width`: sequences that got a token, per step, mean;
    `width_by_quarter`: in each quarter of the time; `tokens_per_step`: planned ones, prompts and recomputing included;
    `kv_peak` and `kv_mean`: share of the KV blocks held; `waiting`: mean over the time."""

    num_steps: int
    seconds: float
    width: float
    width_by_quarter: tuple[float, ...]
    tokens_per_step: float
    waiting: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    kv_mean: float
    kv_peak: float
    num_preemptions: int
    num_recomputed_tokens: int


def summary(replay: Replay) -> Summary:
    steps, end_s = replay.steps, replay.seconds
    ttft, gaps = sorted(replay.ttft_s), sorted(replay.gap_s)
    return Summary(
        num_steps=len(steps),
        seconds=end_s,
        width=replay.num_output_tokens / len(steps),
        width_by_quarter=tuple(over_time(replay, steps.width, 4, end_s)),
        tokens_per_step=sum(steps.tokens) / len(steps),
        waiting=over_time(replay, steps.waiting, 1, end_s)[0],
        output_tokens_per_s=replay.num_output_tokens / end_s,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        kv_mean=over_time(replay, steps.blocks_held, 1, end_s)[0] / replay.num_blocks,
        kv_peak=max(steps.blocks_held) / replay.num_blocks,
        num_preemptions=sum(steps.preemptions),
        num_recomputed_tokens=sum(steps.recomputed),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of all lies below, in a sorted row; the last for a share of 1, 0 of nothing. One that
    happened, not one between two."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def over_time(replay: Replay, column: array[int], num_parts: int, end_s: float) -> list[float]:
    """Mean of a column in each of `num_parts` equal parts of the time from 0 to `end_s`. While the engine is idle it
    counts as 0."""
    steps, part_s = replay.steps, end_s / num_parts
    totals = [0.0] * num_parts
    for ended_s, seconds, value in zip(steps.ended_s, steps.seconds, column, strict=True):
        begun_s = ended_s - seconds
        if begun_s >= end_s:
            break
        first, last = int(begun_s / part_s), min(num_parts - 1, int(ended_s / part_s))
        for part in range(first, last + 1):
            inside_s = min(ended_s, (part + 1) * part_s) - max(begun_s, part * part_s)
            totals[part] += value * max(0.0, inside_s)
    return [total / part_s for total in totals]


def waiting_at(replay: Replay, at_s: float) -> int:
    """How many waited at this time of the play."""
    steps = replay.steps
    index = next((i for i, ended_s in enumerate(steps.ended_s) if ended_s >= at_s), len(steps) - 1)
    return steps.waiting[index]


def sparkline(values: Sequence[float], full: float) -> str:
    """One bar a value; the highest bar is `full`."""
    top = len(_BARS) - 1
    return "".join(_BARS[max(0, min(top, round(value / full * top)))] for value in values)
