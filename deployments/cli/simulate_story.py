"""`brimful simulate story`: fixed batches against continuous ones, then one setting at a time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.console import Console, result_lines, seldom
from deployments.cli.simulate_cost import given_cost
from replica.errors import ResourceError, SettingError

if TYPE_CHECKING:
    from bench.fit.engine import MeasuredEngine
    from bench.simulate.step_cost import StepCost
    from bench.story.experiment import StorySize
    from bench.story.replay import OpenEngine
    from replica.config import EngineConfig

EXIT_FAILED_CHECK = 1


class EngineKind(StrEnum):
    """Where the story happens."""

    SIMULATED = "simulated"
    REAL = "real"


DEFAULT_COSTS = {EngineKind.SIMULATED: "h100-8b", EngineKind.REAL: "cpu-smollm2"}


def story(
    engine: Annotated[EngineKind, typer.Option(help="virtual time, or the embedded model on CPU")] = (
        EngineKind.SIMULATED
    ),
    cost: Annotated[
        str | None,
        typer.Option(help="step cost: a preset or a cost file [default: h100-8b; cpu-smollm2 with --engine real]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of lengths and arrivals")] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="also one table for a README, before the JSON")] = False,
) -> int:
    """Show what fixed batches waste, and what each setting changes.

    The same requests with ever more spread output lengths, in fixed batches and in continuous ones; the gain is held
    against what it must be. Then max_num_seqs, chunked prefill and watermark, one at a time. Exit code 1 when a check
    fails; sentences that are "not shown" are only told. Takes half a minute simulated, about 6 minutes real (on 2 quiet
    cores). The last line is JSON.
    """
    from bench.story.experiment import real_size, simulated_size, virtual_engines

    began_s = time.monotonic()
    if seed < 0:
        raise SettingError("--seed", seed, "at least 0")
    step_cost = given_cost(cost or DEFAULT_COSTS[engine])
    console = Console(sys.stderr)
    if engine is EngineKind.REAL:
        size, open_engine = real_size(seed), _real_engines(console.doing)
    else:
        size, open_engine = simulated_size(seed), virtual_engines(step_cost)
    try:
        found = _tell(open_engine, size, step_cost, seldom(console.doing), markdown=markdown)
    except ValueError as error:
        raise ResourceError(f"the story can't be played: {error}") from error
    result = {"command": "simulate story", "engine": engine.value, "cost": step_cost.name, "seed": seed, **found}
    print(json.dumps(result | {"wall_s": round(time.monotonic() - began_s, 1)}))
    return 0 if found["passed"] else EXIT_FAILED_CHECK


def _tell(
    open_engine: OpenEngine, size: StorySize, cost: StepCost, progress: Callable[[str], None], *, markdown: bool
) -> dict[str, Any]:
    """Plays and prints one part after the other; returns what goes into the JSON."""
    from bench.story import report
    from bench.story.door import read_door
    from bench.story.experiment import play_batching, studies
    from bench.story.study import play_study

    result_lines(report.about(size.spread, cost))
    rows, door = play_batching(open_engine, size, cost, progress)
    checks = [check for row in rows for check in row.checks()]
    for table in (report.sides_table(rows), report.gains_table(rows), report.verdict_lines(rows, checks)):
        result_lines(["", *table])
    at_the_door = read_door(door, size.spread.batch_size)
    result_lines(["", *report.door_lines(door, at_the_door)])
    knobs, readings = [], [("queue at the door", at_the_door)]
    for study, read in studies(size, cost):
        played = play_study(open_engine, study, progress, first_again=size.first_again)
        reading = read(played.rows, played.again.result if played.again else None)
        result_lines(["", *report.knob_table(study, played, reading)])
        knobs.append(report.knob_json(study, played, reading))
        readings.append((study.name, reading))
    if markdown:
        result_lines(["", *report.markdown_table(rows), "", *report.markdown_readings(readings)])
    return {
        "passed": all(check.passed for check in checks),
        "checks": [report.check_json(check) for check in checks],
        "spreads": [report.spread_json(row) for row in rows],
        "door": asdict(door) | {"reading": asdict(at_the_door)},
        "knobs": knobs,
    }


def _real_engines(progress: Callable[[str], None]) -> OpenEngine:
    from deployments.cli.real_engine import real_engine

    @contextmanager
    def open_engine(config: EngineConfig) -> Iterator[MeasuredEngine]:
        with real_engine(config, progress) as engine:
            yield engine

    return open_engine
