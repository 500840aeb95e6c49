"""What the shipped policy must hold in every cell, and the study's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.routing.decision_speed import DecisionSpeed
from bench.routing.loads import LOADS, Cell
from bench.routing.study import BASELINES, LOAD_ONLY, SHIPPED, Measured

WORSE = 0.03
"""So much worse than the best simple policy is still as good."""
PREFIX_GAIN = 2.0
MAX_SPREAD = 1.5
SPREAD_REPLICAS = 8
"""A burst is judged where each replica gets 8 of it: of one that gets 1 in the mean, 2 are twice too many already."""
LIMITS_US = {64: ("p99_us", 200.0), 1000: ("mean_us", 200.0)}

Table = Mapping[Cell, Mapping[str, Measured]]


class Goal(NamedTuple):
    """`met` is None when nothing that ran says so. `missed`: where not, with numbers."""

    name: str
    met: bool | None
    missed: tuple[str, ...] = ()


def goals(table: Table, bursts: Mapping[Cell, float], speeds: Sequence[DecisionSpeed]) -> list[Goal]:
    """Every goal of the study, from what has run."""
    full = {cell: rows for cell, rows in table.items() if SHIPPED in rows and set(BASELINES) <= set(rows)}
    heavy = {cell: rows for cell, rows in full.items() if LOADS[cell.shape].is_prefix_heavy}
    judged = {cell: spread for cell, spread in bursts.items() if cell.num_replicas == SPREAD_REPLICAS}
    return [
        _goal("TTFT p95 at most 3 % worse than the best simple policy's", full, _slow),
        _goal("goodput at most 3 % worse than the best simple policy's", full, _poor),
        _goal(f"prefix-heavy: goodput at least {PREFIX_GAIN:g} x the best load-only policy's", heavy, _no_gain),
        _goal(f"a burst of 64 spreads with max/mean at most {MAX_SPREAD:g}", judged, _uneven),
        _goal("decisions within 200 us (p99 at 64 replicas, mean at 1,000)", {s: s for s in speeds}, _late),
    ]


def _goal(name: str, cases: Mapping[Any, Any], missed_by: Any) -> Goal:
    missed = tuple(filter(None, (missed_by(cell, found) for cell, found in cases.items())))
    return Goal(name, not missed if cases else None, missed)


def _slow(cell: Cell, rows: Mapping[str, Measured]) -> str:
    best = min((rows[name] for name in BASELINES), key=lambda row: row.ttft_p95_s)
    ours = rows[SHIPPED].ttft_p95_s
    if ours <= (1.0 + WORSE) * best.ttft_p95_s:
        return ""
    return f"{told(cell)}: {ours:.3f} s, {best.policy} {best.ttft_p95_s:.3f} s ({ours / best.ttft_p95_s - 1:+.1%})"


def _poor(cell: Cell, rows: Mapping[str, Measured]) -> str:
    best = max((rows[name] for name in BASELINES), key=lambda row: row.goodput)
    ours = rows[SHIPPED].goodput
    if ours >= (1.0 - WORSE) * best.goodput:
        return ""
    return f"{told(cell)}: {ours:.2f}/s, {best.policy} {best.goodput:.2f}/s ({ours / best.goodput - 1:+.1%})"


def _no_gain(cell: Cell, rows: Mapping[str, Measured]) -> str:
    best = max((rows[name] for name in LOAD_ONLY), key=lambda row: row.goodput)
    ours = rows[SHIPPED].goodput
    if ours >= PREFIX_GAIN * best.goodput:
        return ""
    return f"{told(cell)}: {ours:.2f}/s, {best.policy} {best.goodput:.2f}/s ({ours / best.goodput:.2f} x)"


def _uneven(cell: Cell, spread: float) -> str:
    return f"{told(cell)}: {spread:.2f}" if spread > MAX_SPREAD else ""


def _late(speed: DecisionSpeed, _: DecisionSpeed) -> str:
    name, limit = LIMITS_US.get(speed.num_replicas, ("p99_us", float("inf")))
    value: float = getattr(speed, name)
    return f"{speed.num_replicas} replicas: {value:.0f} us" if value > limit else ""


def told(cell: Cell) -> str:
    """A cell in words."""
    routers = "1 router" if cell.num_routers == 1 else f"{cell.num_routers} routers"
    return f"{cell.shape}, {cell.num_replicas} replicas, {cell.report_delay_s:g} s, {routers}"


def header() -> str:
    return (
        f"{'policy':<18}{'TTFT p50':>9}{'p95 s':>8}{'goodput/s':>11}{'good':>7}{'max/mean':>9}{'hits':>7}{'CPU s':>7}"
    )


def row_of(row: Measured) -> str:
    return (
        f"{row.policy:<18}{row.ttft_p50_s:>9.3f}{row.ttft_p95_s:>8.3f}{row.goodput:>11.2f}{row.good_share:>7.1%}"
        f"{row.max_over_mean:>9.2f}{row.hit_share:>7.1%}{row.cpu_s:>7.1f}"
    )


def goal_lines(found: Sequence[Goal]) -> Iterator[str]:
    """One line a goal, and one for each case in which it is missed."""
    for goal in found:
        said = {True: "met", False: f"MISSED in {len(goal.missed)}", None: "not measured"}[goal.met]
        yield f"{goal.name}: {said}"
        for case in goal.missed:
            yield f"    {case}"
