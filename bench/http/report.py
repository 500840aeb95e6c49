"""The numbers as tables for people and as one JSON document, with each goal met or not."""

from __future__ import annotations

from typing import Any

from bench.engine_speed.rows import Row
from bench.http.measure import Measured, quantile
from bench.http.sides import CLIENT, EngineSide

MIN_THROUGHPUT = 0.9
"""Output tokens a second through HTTP over the engine's own, from so many streams on:"""
THROUGHPUT_STREAMS = 32
MAX_ADDED_FIRST_TOKEN_S = 0.015
"""With one stream."""
MAX_GAP_RATIO = {0.5: 1.2, 0.99: 2.0}
"""Between events of a stream through HTTP, over the engine's own between tokens: median and p99."""
MAX_DISTURBANCE = 0.15
"""Cores spent on other work than the run: more shows in the numbers."""

Goals = dict[str, bool | None]
ENGINE = EngineSide.name


def throughput_ratio(measured: Measured, row: Row, side: str) -> float:
    return measured.tokens_per_s(row, side) / measured.tokens_per_s(row, ENGINE)


def added_first_token_s(measured: Measured, row: Row, side: str) -> float:
    return measured.first_token_s(row, side) - measured.first_token_s(row, ENGINE)


def gap_ratio(measured: Measured, row: Row, side: str, share: float) -> float | None:
    """None for rows whose answers have no second token."""
    own = quantile(measured.gaps_s(row, ENGINE), share)
    return quantile(measured.gaps_s(row, side), share) / own if own else None


def goals(measured: Measured, sides: list[str]) -> Goals:
    met: Goals = {}
    for side in sides:
        for row in measured.runs:
            if row.num_seqs >= THROUGHPUT_STREAMS:
                name = f"{side}: at least {MIN_THROUGHPUT:.0%} of the engine's tokens/s at {row}"
                met[name] = throughput_ratio(measured, row, side) >= MIN_THROUGHPUT
            if row.num_seqs == 1:
                name = f"{side}: first token at most {MAX_ADDED_FIRST_TOKEN_S * 1e3:.0f} ms later at {row}"
                met[name] = added_first_token_s(measured, row, side) <= MAX_ADDED_FIRST_TOKEN_S
            for share, limit in MAX_GAP_RATIO.items():
                ratio = gap_ratio(measured, row, side, share)
                if ratio is not None:
                    met[f"{side}: p{share * 100:.0f} between tokens at most {limit:g} x at {row}"] = ratio <= limit
    return met


def tables(measured: Measured, sides: list[str]) -> list[str]:
    lines = [
        "| streams x prompt/output | side | output tokens/s | share | first token p50, ms | added | between events "
        "p50, ms | x | p99, ms | x | tokens an event | load client, cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        "| " + " | ".join(_cells(measured, row, side)) + " |" for row in measured.runs for side in (ENGINE, *sides)
    ]
    return [
        *lines,
        "",
        "CPU milliseconds a token, by kind of process:",
        "",
        *_cpu_table(measured, sides),
        *_warning(measured),
    ]


def _cells(measured: Measured, row: Row, side: str) -> list[str]:
    gaps = measured.gaps_s(row, side)
    ratios = [gap_ratio(measured, row, side, share) for share in MAX_GAP_RATIO]
    is_engine = side == ENGINE
    timed = [
        cell
        for share, ratio in zip(MAX_GAP_RATIO, ratios, strict=True)
        for cell in (f"{quantile(gaps, share) * 1e3:.1f}", "" if is_engine or ratio is None else f"{ratio:.2f}")
    ]
    return [
        str(row),
        side,
        f"{measured.tokens_per_s(row, side):.1f}",
        "" if is_engine else f"{throughput_ratio(measured, row, side):.1%}",
        f"{measured.first_token_s(row, side) * 1e3:.1f}",
        "" if is_engine else f"{added_first_token_s(measured, row, side) * 1e3:+.1f}",
        *timed,
        f"{measured.tokens_per_event(row, side):.2f}",
        "" if is_engine else f"{measured.cores(row, side, CLIENT):.3f}",
    ]


def _cpu_table(measured: Measured, sides: list[str]) -> list[str]:
    costs = {(row, side): measured.cpu_s_per_token(row, side) for row in measured.runs for side in (ENGINE, *sides)}
    kinds = list(dict.fromkeys(kind for cost in costs.values() for kind in cost))
    lines = ["| streams x prompt/output | side | " + " | ".join(kinds) + " |", "|" + "---|" * (len(kinds) + 2)]
    for (row, side), cost in costs.items():
        cells = [f"{cost[kind] * 1e3:.2f}" if kind in cost else "" for kind in kinds]
        lines.append("| " + " | ".join([str(row), side, *cells]) + " |")
    return lines


def _warning(measured: Measured) -> list[str]:
    """Whether these numbers are worth anything."""
    if measured.disturbance <= MAX_DISTURBANCE:
        return []
    return [
        "",
        f"**the machine did other work: up to {measured.disturbance:.1f} cores of it during a run; measure again**",
    ]


def rows_json(measured: Measured, sides: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "num_streams": row.num_seqs,
            "prompt_tokens": row.num_prompt_tokens,
            "output_tokens": row.num_output_tokens,
            **{side: _side_json(measured, row, side) for side in (ENGINE, *sides)},
        }
        for row in measured.runs
    ]


def _side_json(measured: Measured, row: Row, side: str) -> dict[str, Any]:
    gaps = measured.gaps_s(row, side)
    found: dict[str, Any] = {
        "seconds": [round(run.seconds, 4) for run in measured.runs[row][side]],
        "tokens_per_s": round(measured.tokens_per_s(row, side), 2),
        "first_token_p50_ms": _ms(measured.first_token_s(row, side)),
        **{f"gap_p{share * 100:.0f}_ms": _ms(quantile(gaps, share)) for share in MAX_GAP_RATIO},
        "cpu_ms_per_token": {kind: _ms(cost) for kind, cost in measured.cpu_s_per_token(row, side).items()},
    }
    if side == ENGINE:
        return found
    ratios = {f"gap_p{share * 100:.0f}_ratio": gap_ratio(measured, row, side, share) for share in MAX_GAP_RATIO}
    return {
        **found,
        "throughput_ratio": round(throughput_ratio(measured, row, side), 4),
        "added_first_token_p50_ms": _ms(added_first_token_s(measured, row, side)),
        **{name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()},
        "tokens_per_event": round(measured.tokens_per_event(row, side), 3),
        "load_client_cores": round(measured.cores(row, side, CLIENT), 4),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
