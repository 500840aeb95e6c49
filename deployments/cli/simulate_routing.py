"""`brimful simulate routing`: the shipped routing policy beside simple ones, in clusters of any size."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.console import Console, result_lines
from deployments.cli.simulate_cost import given_cost
from replica.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Collection

    from bench.routing.decision_speed import DecisionSpeed
    from bench.routing.loads import Cell
    from bench.routing.study import Job, Measured

Repeated = list[str] | None
Numbers = list[int] | None
REPLICAS, DELAYS, ROUTERS = (8, 64, 1000), (0.0, 1.0, 5.0), (1, 16)
BURST_SEEDS = tuple(range(5))
QUICK_SHARE = 0.4
NUM_DECISIONS = 5000


def routing(
    shape: Annotated[Repeated, typer.Option(help="W2, W4 or W8-shared-prefix; may be repeated [default: all]")] = None,
    policy: Annotated[
        Repeated, typer.Option(help="only this and cost_s; may be repeated [default: all that are judged]")
    ] = None,
    replicas: Annotated[Numbers, typer.Option(help="may be repeated [default: 8 64 1000]")] = None,
    report_delay: Annotated[
        list[float] | None, typer.Option(help="age of load reports, seconds; may be repeated [default: 0 1 5]")
    ] = None,
    routers: Annotated[Numbers, typer.Option(help="may be repeated [default: 1 16]")] = None,
    cost: Annotated[str, typer.Option(help="step cost: a preset or a cost file")] = "h100-8b",
    seeds: Annotated[int, typer.Option(help="traces to average over up to 8 replicas; one for more")] = 3,
    first_seed: Annotated[int, typer.Option(help="seed of the first trace")] = 0,
    length: Annotated[float, typer.Option(help="length of the traces, 1 is as published here")] = 1.0,
    workers: Annotated[int | None, typer.Option(help="processes [default: one a core]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="8 replicas, delays 0 and 5 s, short traces: a minute")
    ] = False,
) -> int:
    """Route the same requests by one policy after the other, and compare what clients see.

    Columns: TTFT p50 and p95, requests within the objectives per second and as a share, requests at the busiest replica
    over the mean, prompt tokens found cached, seconds of CPU that simulating took. Then the goals, and what misses
    them; the last line is JSON. The whole table takes about an hour on 2 cores. The exit code is 1 when a goal is
    missed.
    """
    from bench.routing.verdict import goal_lines, goals

    began_s = time.monotonic()
    cells = _cells(shape, replicas, report_delay, routers, quick=quick)
    policies = _policies(policy)
    _check(seeds, first_seed, length, workers)
    given_cost(cost)
    share = length * (QUICK_SHARE if quick else 1.0)
    console = Console(sys.stderr)
    console.doing("measuring decisions")
    speeds = _speeds()
    jobs = _jobs(cells, policies, range(first_seed, first_seed + (1 if quick else seeds)), share, cost, console)
    table = _measured(jobs, cells, len(policies), workers or len(os.sched_getaffinity(0)), console)
    bursts = _bursts(cells, cost, console)
    found = goals(table, bursts, speeds)
    result_lines(["", *_told(bursts, speeds), "", *goal_lines(found)])
    result = {
        "command": "simulate routing",
        "cost": cost,
        "seeds": seeds,
        "first_seed": first_seed,
        "length": share,
        "cells": [
            {**cell._asdict(), "policies": [row._asdict() for row in rows.values()]} for cell, rows in table.items()
        ],
        "bursts": [{**cell._asdict(), "max_over_mean": spread} for cell, spread in bursts.items()],
        "decisions": [speed._asdict() for speed in speeds],
        "goals": [goal._asdict() for goal in found],
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(result))
    return 1 if any(goal.met is False for goal in found) else 0


def _cells(
    shapes: Repeated, replicas: Numbers, delays: list[float] | None, routers: Numbers, *, quick: bool
) -> list[Cell]:
    from bench.routing.loads import LOADS, Cell

    names = _known("--shape", shapes, LOADS)
    for flag, values, most in (("--replicas", replicas, 10_000), ("--routers", routers, 256)):
        for value in values or ():
            if not 1 <= value <= most:
                raise SettingError(flag, value, f"from 1 to {most}")
    for delay in delays or ():
        if not 0.0 <= delay <= 60.0:
            raise SettingError("--report-delay", delay, "from 0 to 60 seconds")
    sizes = replicas or (REPLICAS[:1] if quick else REPLICAS)
    ages = delays or (DELAYS[::2] if quick else DELAYS)
    return [
        Cell(name, size, age, number)
        for size in sizes
        for name in names
        for age in ages
        for number in routers or ROUTERS
    ]


def _policies(given: Repeated) -> list[str]:
    from bench.routing.study import BASELINES, POLICIES, SHIPPED

    names = _known("--policy", given, POLICIES) if given else list(BASELINES)
    return list(dict.fromkeys((SHIPPED, *names)))


def _known(flag: str, given: Repeated, allowed: Collection[str]) -> list[str]:
    for name in given or ():
        if name not in allowed:
            raise SettingError(flag, name, f"one of {', '.join(allowed)}")
    return list(given or allowed)


def _check(seeds: int, first_seed: int, length: float, workers: int | None) -> None:
    if not 1 <= seeds <= 1000:
        raise SettingError("--seeds", seeds, "from 1 to 1000")
    if not 0 <= first_seed <= 1_000_000:
        raise SettingError("--first-seed", first_seed, "from 0 to 1000000")
    if not 0.01 <= length <= 100.0:
        raise SettingError("--length", length, "from 0.01 to 100")
    if workers is not None and not 1 <= workers <= 256:
        raise SettingError("--workers", workers, "from 1 to 256")


def _speeds() -> list[DecisionSpeed]:
    from bench.routing.decision_speed import time_decisions
    from bench.routing.study import POLICIES, SHIPPED

    return [time_decisions(size, NUM_DECISIONS, POLICIES[SHIPPED], time.perf_counter) for size in (64, 1000)]


def _jobs(cells: list[Cell], policies: list[str], seeds: range, share: float, cost: str, console: Console) -> list[Job]:
    """All that has to be simulated, the largest first: the last ones to end are then short."""
    from bench.routing.loads import LOADS
    from bench.routing.study import SEVERAL_SEEDS_UP_TO, Job, capacity_of, run_for

    per_replica: dict[str, float] = {}
    for shape in dict.fromkeys(cell.shape for cell in cells):
        console.doing(f"measuring the capacity of one replica under {shape}")
        per_replica[shape] = capacity_of(LOADS[shape], given_cost(cost))
    runs = dict.fromkeys((run_for(cell, name), name) for cell in cells for name in policies)
    return [
        Job(
            cell,
            name,
            tuple(seeds) if cell.num_replicas <= SEVERAL_SEEDS_UP_TO else tuple(seeds[:1]),
            per_replica[cell.shape],
            share,
            cost,
        )
        for cell, name in sorted(runs, key=lambda run: -run[0].num_replicas)
    ]


def _measured(
    jobs: list[Job], cells: list[Cell], num_policies: int, num_workers: int, console: Console
) -> dict[Cell, dict[str, Measured]]:
    """Each cell's rows by policy; its table is shown when its last policy has ended."""
    from bench.routing.study import measure, run_for
    from bench.routing.verdict import header, row_of, told

    began_s = time.monotonic()
    table: dict[Cell, dict[str, Measured]] = {cell: {} for cell in cells}
    num_done = 0
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(measure, job): job for job in jobs}
        console.doing(f"simulating: 0/{len(jobs)} runs")
        try:
            for done in as_completed(running):
                job, num_done = running[done], num_done + 1
                spent_s = time.monotonic() - began_s
                console.doing(f"simulating: {num_done}/{len(jobs)} runs in {spent_s:.0f} s; last {told(job.cell)}")
                for cell in [cell for cell in cells if run_for(cell, job.policy) == job.cell]:
                    rows = table[cell]
                    rows[job.policy] = done.result()
                    if len(rows) == num_policies:
                        result_lines(["", told(cell), header(), *map(row_of, rows.values())])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return table


def _bursts(cells: list[Cell], cost: str, console: Console) -> dict[Cell, float]:
    """For each cluster once, whatever its load."""
    from bench.routing.study import SHIPPED, burst_spread

    bursts: dict[Cell, float] = {}
    for cell in cells:
        if cell.shape == cells[0].shape:
            console.doing(f"bursts: {cell.num_replicas} replicas")
            bursts[cell] = burst_spread(cell, SHIPPED, BURST_SEEDS, cost)
    return bursts


def _told(bursts: dict[Cell, float], speeds: list[DecisionSpeed]) -> list[str]:
    lines: list[Any] = [
        f"burst of 64, {cell.num_replicas} replicas, {cell.report_delay_s:g} s, routers {cell.num_routers}: "
        f"max/mean {spread:.2f}"
        for cell, spread in bursts.items()
    ]
    return lines + [
        f"a decision among {speed.num_replicas} replicas: mean {speed.mean_us:.0f} us, p99 {speed.p99_us:.0f} us"
        for speed in speeds
    ]
