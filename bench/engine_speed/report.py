"""The numbers as tables for people and as one JSON document, with each goal met or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.engine_speed.limits import MachineLimits, middle
from bench.engine_speed.measure import Measured
from bench.engine_speed.rows import PREFILL, Row
from bench.engine_speed.sides import OwnSide

MIN_SHARE_OF_LIMIT = 0.6
MAX_OUTSIDE_SHARE = 0.08
OUTSIDE_SEQS = 64
MIN_RATIO = {"vllm": 1.3, "transformers": 3.0}
"""Our tokens a second over a peer's, at least."""
RATIO_SEQS = {1, 8, 32, 64}
MAX_BUSY_BESIDE = 0.05
"""Of one core: idle processes look for news now and then."""
MAX_DISTURBANCE = 0.15
"""Cores spent on other work than the run: more shows in the numbers."""

Goals = dict[str, bool | None]
_OURS = OwnSide.name


def rate(row: Row, seconds: float) -> float:
    """Tokens a second: output tokens, or prompt tokens where prompts are all there is."""
    return (row.total_prompt_tokens if row.is_prefill else row.total_output_tokens) / seconds


def prefill_rate(measured: Measured, row: Row) -> float:
    """Our prompt tokens over the time until everybody had a first token."""
    run = measured.middle_run(row, _OURS)
    return row.total_prompt_tokens / (run.first_tokens_s or run.seconds)


def floor_s(measured: Measured, row: Row, limits: MachineLimits) -> float:
    """The shortest time in which this machine could run the steps that our engine ran."""
    return sum(step.floor_s(limits) for step in measured.middle_run(row, _OURS).steps)


def share_of_limit(measured: Measured, row: Row, limits: MachineLimits) -> float:
    return floor_s(measured, row, limits) / measured.middle_run(row, _OURS).seconds


# ---- our engine against the machine ----


def engine_table(measured: Measured) -> list[str]:
    limits = middle(measured.limits)
    heads = (
        "sequences x prompt/output | output tokens/s | prefill tokens/s | steps | s | at the limits, s | share | spread"
    )
    lines = [f"| {heads} |", "|---|---|---|---|---|---|---|---|"]
    for row in measured.runs:
        run = measured.middle_run(row, _OURS)
        output = "-" if row.is_prefill else f"{rate(row, run.seconds):.1f}"
        lines.append(
            f"| {row} | {output} | {prefill_rate(measured, row):.0f} | {len(run.steps)} | {run.seconds:.2f} "
            f"| {floor_s(measured, row, limits):.2f} | {share_of_limit(measured, row, limits):.0%} "
            f"| {measured.spread(row, _OURS):.0%} |"
        )
    return [*lines, "", limits_line(measured), *disturbance_lines(measured)]


def disturbance_lines(measured: Measured) -> list[str]:
    """Whether these numbers are worth anything."""
    if measured.disturbance <= MAX_DISTURBANCE:
        return []
    return [f"**the machine did other work: up to {measured.disturbance:.1f} cores of it during a run; measure again**"]


def limits_line(measured: Measured) -> str:
    limits = middle(measured.limits)
    every = [one.bandwidth / 1e9 for one in measured.limits], [one.rate / 1e9 for one in measured.limits]
    return (
        f"limits: {limits.bandwidth / 1e9:.1f} GB/s of weight streaming ({min(every[0]):.1f} to {max(every[0]):.1f}), "
        f"{limits.rate / 1e9:.0f} GFLOP/s of float32 matrix product ({min(every[1]):.0f} to {max(every[1]):.0f}); "
        f"medians of {len(measured.limits)} measurements before, between and after the rounds"
    )


def engine_goals(measured: Measured, outside_share: float | None) -> Goals:
    limits = middle(measured.limits)
    met: Goals = {
        f"at least {MIN_SHARE_OF_LIMIT:.0%} of the machine's limit at {row}": share_of_limit(measured, row, limits)
        >= MIN_SHARE_OF_LIMIT
        for row in measured.runs
    }
    met[f"at most {MAX_OUTSIDE_SHARE:.0%} of a step outside the forward at {OUTSIDE_SEQS} sequences"] = (
        None if outside_share is None else outside_share <= MAX_OUTSIDE_SHARE
    )
    return met


def engine_rows(measured: Measured) -> list[dict[str, Any]]:
    limits = middle(measured.limits)
    return [
        {
            **_row(row),
            "output_tokens_per_s": None if row.is_prefill else round(rate(row, run.seconds), 2),
            "prefill_tokens_per_s": round(prefill_rate(measured, row), 1),
            "num_steps": len(run.steps),
            "seconds": _rounds(measured, row, _OURS),
            "floor_s": round(floor_s(measured, row, limits), 4),
            "share_of_limit": round(share_of_limit(measured, row, limits), 4),
        }
        for row in measured.runs
        for run in [measured.middle_run(row, _OURS)]
    ]


# ---- our engine beside peers ----


def peers_table(measured: Measured, names: Iterable[str]) -> list[str]:
    peers = list(names)
    heads = ["sequences x prompt/output", "brimful"]
    for peer in peers:
        heads += [peer, f"brimful / {peer}", "goal"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in measured.runs:
        cells = [f"{row}{' (prefill tokens/s)' if row.is_prefill else ''}", _cell(measured, row, _OURS)]
        for peer in peers:
            ratio, goal = ratio_to(measured, row, peer), goal_of(row, peer)
            told = "-" if goal is None else f"{goal:g}"
            cells += [_cell(measured, row, peer), "-" if ratio is None else f"{ratio:.2f}", told]
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "output tokens/s (prompts alone: prefill tokens/s); in brackets the rounds, and how far apart they are",
        f"the sides that waited used at most {measured.busy_beside:.1%} of one core meanwhile",
    ]


def _cell(measured: Measured, row: Row, side: str) -> str:
    seconds = measured.seconds(row, side)
    if seconds is None:
        return "-"
    return f"{rate(row, seconds):.1f} ({len(measured.runs[row][side])}, {measured.spread(row, side):.0%})"


def ratio_to(measured: Measured, row: Row, peer: str) -> float | None:
    """Our tokens a second over the peer's."""
    ours, theirs = measured.seconds(row, _OURS), measured.seconds(row, peer)
    return None if ours is None or theirs is None else theirs / ours


def goal_of(row: Row, peer: str) -> float | None:
    """The least ratio that is a goal here: at 1, 8, 32 and 64 sequences that decode, and for prompts alone."""
    decodes = row.num_seqs in RATIO_SEQS and not row.is_prefill
    return MIN_RATIO[peer] if decodes or row == PREFILL else None


def peers_goals(measured: Measured, names: Iterable[str]) -> Goals:
    met: Goals = {}
    for peer in names:
        for row in measured.runs:
            goal, ratio = goal_of(row, peer), ratio_to(measured, row, peer)
            if goal is not None:
                what = f"{row.num_prompt_tokens} token prompts" if row.is_prefill else f"{row}"
                met[f"at least {goal:g} x {peer} at {what}"] = None if ratio is None else ratio >= goal
    met["the sides that wait are idle"] = measured.busy_beside <= MAX_BUSY_BESIDE
    return met


def peers_rows(measured: Measured, names: Iterable[str]) -> list[dict[str, Any]]:
    peers = list(names)
    found = []
    for row in measured.runs:
        entry = {**_row(row), "unit": "prefill tokens/s" if row.is_prefill else "output tokens/s"}
        for side in (_OURS, *peers):
            seconds = measured.seconds(row, side)
            entry[side] = None if seconds is None else round(rate(row, seconds), 2)
            entry[f"{side}_seconds"] = _rounds(measured, row, side)
        for peer in peers:
            ratio = ratio_to(measured, row, peer)
            entry[f"over_{peer}"] = None if ratio is None else round(ratio, 3)
            entry[f"goal_over_{peer}"] = goal_of(row, peer)
        found.append(entry)
    return found


def _row(row: Row) -> dict[str, Any]:
    return {"num_seqs": row.num_seqs, "prompt_tokens": row.num_prompt_tokens, "output_tokens": row.num_output_tokens}


def _rounds(measured: Measured, row: Row, side: str) -> list[float]:
    return [round(run.seconds, 4) for run in measured.runs[row].get(side, [])]


def limits_json(measured: Measured) -> dict[str, Any]:
    limits = middle(measured.limits)
    return {
        "bandwidth_gb_s": round(limits.bandwidth / 1e9, 2),
        "rate_gflop_s": round(limits.rate / 1e9, 1),
        "measured": [[round(one.bandwidth / 1e9, 2), round(one.rate / 1e9, 1)] for one in measured.limits],
    }


def goal_lines(goals: Goals) -> list[str]:
    return [
        f"{'not measured' if met is None else 'met' if met else 'NOT MET':12}  {goal}" for goal, met in goals.items()
    ]
