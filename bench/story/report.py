"""The story's tables as lines of text, and all of it as one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from bench.simulate.step_cost import StepCost
from bench.story.checks import Check
from bench.story.door import Door
from bench.story.readings import Reading
from bench.story.spread import PICTURE_BATCHES, Side, SpreadRow, SpreadSize
from bench.story.study import KnobStudy, PlayedStudy

_SIDE_HEAD = (
    f"{'output lengths':14} {'batching':10} {f'batch width over {PICTURE_BATCHES} fixed batches':30} {'width':>5} "
    f"{'tok/step':>8} {'steps':>6} {'waiting':>7} {'tok/s':>7} {'TTFT p50':>8} {'ITL p50':>8} {'p99':>7}"
)
_GAIN_HEAD = (
    f"{'output lengths':14} {'mean':>6} {'longest':>7} | {'gain in steps':>13} {'E[max]/E[L]':>11} {'off':>6} | "
    f"{'gain in seconds':>15} {'explained':>9} {'off':>6} | {'as timed':>8}"
)
_KNOB_HEAD = (
    f"{'':23} {'width':>5} {'tok/step':>8} {'steps':>6} {'waiting':>7} {'tok/s':>7} {'TTFT p50':>9} {'p99':>9} "
    f"{'ITL p50':>8} {'p99':>7} {'KV held':>7} {'preempted':>9} {'recomputed':>10}"
)


def about(size: SpreadSize, cost: StepCost) -> list[str]:
    """What is compared, under the same requests."""
    count = size.batch_size * size.num_batches
    return [
        f"Fixed batches of {size.batch_size} against continuous ones: {count} requests, all present, prompts of "
        f"{size.num_prompt_tokens} tokens,",
        f"answers of {size.mean_output_tokens} on average. Seconds are explained by the step cost {cost.name}.",
    ]


def sides_table(rows: Iterable[SpreadRow]) -> list[str]:
    """`waiting`: when nobody waits for a continuous batch any more. TTFT in seconds, ITL in milliseconds."""
    lines = [_SIDE_HEAD]
    for row in rows:
        lines.append(_side_line(row.name, "fixed", row.static))
        lines.append(_side_line("", "continuous", row.continuous))
    return lines


def gains_table(rows: Iterable[SpreadRow]) -> list[str]:
    """Measured without drain, beside what was computed beforehand. Seconds are those of undisturbed steps; `as timed`
    has the disturbances of a shared machine too."""
    lines = [_GAIN_HEAD]
    for row in rows:
        predicted = row.predicted
        steps_off = row.gain_in_steps / predicted.gain_in_steps - 1
        seconds_off = row.gain_in_seconds / predicted.gain_in_seconds - 1
        lines.append(
            f"{row.name:14} {row.mean_output_tokens:6.2f} {row.longest_output_tokens:7} | {row.gain_in_steps:13.3f} "
            f"{predicted.gain_in_steps:11.3f} {steps_off:+6.1%} | {row.gain_in_seconds:15.3f} "
            f"{predicted.gain_in_seconds:9.3f} {seconds_off:+6.1%} | {row.gain_as_timed:8.3f}"
        )
    return lines


def knob_table(study: KnobStudy, played: PlayedStudy, reading: Reading) -> list[str]:
    """One line a row, and what they say."""
    lines = [f"{study.name}: {len(study.trace)} requests", _KNOB_HEAD]
    for row in [*played.rows, *([played.again] if played.again else [])]:
        one = row.result
        lines.append(
            f"{row.label:23} {one.width:5.1f} {one.tokens_per_step:8.1f} {one.num_steps:6} {one.waiting:7.1f} "
            f"{one.output_tokens_per_s:7.1f} {one.ttft_p50_s:8.3f}s {one.ttft_p99_s:8.3f}s {one.itl_p50_s * 1e3:8.1f} "
            f"{one.itl_p99_s * 1e3:7.1f} {one.kv_mean:7.0%} {one.num_preemptions:9} {one.num_recomputed_tokens:10}"
        )
    return [*lines, f"-> {reading.text}"]


def door_lines(door: Door, reading: Reading) -> list[str]:
    """The queue at the door."""
    return [
        f"The queue at the door: W7, arrivals at {door.load_static:.2f} x what fixed batches take, "
        f"{door.load_continuous:.2f} x what continuous ones take",
        f"-> {reading.text}",
    ]


def markdown_table(rows: Iterable[SpreadRow]) -> list[str]:
    """Both tables in one, fixed -> continuous, for a README. Gains: measured, and in brackets what they had to be."""
    heads = (
        "output lengths",
        f"batch width over {PICTURE_BATCHES} fixed batches, fixed and continuous",
        "mean width",
        "tokens a step",
        "steps",
        "waiting",
        "tokens/s",
        "TTFT p50, s",
        "ITL p99, ms",
        "gain in steps",
        "gain in undisturbed seconds",
        "as timed",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        before, after, predicted = row.static, row.continuous, row.predicted
        one, two = before.whole, after.whole
        cells = (
            row.name,
            f"`{before.picture}` `{after.picture}`",
            f"{one.width:.1f} -> {two.width:.1f}",
            f"{one.tokens_per_step:.1f} -> {two.tokens_per_step:.1f}",
            f"{one.num_steps} -> {two.num_steps}",
            f"{before.waiting_then} -> {after.waiting_then}",
            f"{one.output_tokens_per_s:.0f} -> {two.output_tokens_per_s:.0f}",
            f"{one.ttft_p50_s:.1f} -> {two.ttft_p50_s:.1f}",
            f"{one.itl_p99_s * 1e3:.1f} -> {two.itl_p99_s * 1e3:.1f}",
            f"{row.gain_in_steps:.2f} ({predicted.gain_in_steps:.2f})",
            f"{row.gain_in_seconds:.2f} ({predicted.gain_in_seconds:.2f})",
            f"{row.gain_as_timed:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def markdown_readings(readings: Iterable[tuple[str, Reading]]) -> list[str]:
    """A list with a sentence for each."""
    return [f"- `{name}`: {reading.text}" for name, reading in readings]


def verdict_lines(rows: Iterable[SpreadRow], checks: Sequence[Check]) -> list[str]:
    """What is checked, and the tie in seconds as they went by, which isn't."""
    told = [line for row in rows if (line := row.tie_as_timed())]
    return [*(check.as_line() for check in checks), *(f"     {line}" for line in told)]


def spread_json(row: SpreadRow) -> dict[str, Any]:
    return asdict(row) | {
        "closed_form_gain_in_steps": row.predicted.gain_in_steps,
        "explained_gain_in_seconds": row.predicted.gain_in_seconds,
    }


def knob_json(study: KnobStudy, played: PlayedStudy, reading: Reading) -> dict[str, Any]:
    return {"name": study.name, **asdict(played), "reading": asdict(reading)}


def check_json(check: Check) -> dict[str, Any]:
    return asdict(check) | {"off": check.off, "passed": check.passed}


def _side_line(name: str, batching: str, side: Side) -> str:
    whole = side.whole
    return (
        f"{name:14} {batching:10} {side.picture:30} {whole.width:5.1f} {whole.tokens_per_step:8.1f} "
        f"{whole.num_steps:6} {side.waiting_then:7} {whole.output_tokens_per_s:7.1f} {whole.ttft_p50_s:7.2f}s "
        f"{whole.itl_p50_s * 1e3:8.1f} {whole.itl_p99_s * 1e3:7.1f}"
    )
