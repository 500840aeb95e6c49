"""`brimful bench engine`: our engine against the machine's own limits, and where the time of a step goes."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.bench_common import (
    Label,
    Model,
    Rounds,
    RowFlag,
    Save,
    Threads,
    check_folder,
    check_rounds,
    chosen_rows,
    command,
    finish,
    limits_meter,
    measured_config,
    own_side,
    settle,
)
from deployments.cli.console import Console

if TYPE_CHECKING:
    from bench.engine_speed.profile import StepKind
    from replica.config import EngineConfig


def engine(
    model: Model = "embedded",
    row: RowFlag = None,
    rounds: Rounds = 3,
    num_threads: Threads = None,
    save: Save = None,
    label: Label = "",
    profile: Annotated[bool, typer.Option(help="profile the parts of a step, too")] = True,
) -> int:
    """Measure our engine, as a replica runs it, and what this machine could do at best in the same steps.

    Where the time of a step goes is measured after that, with spans around its parts. Exit code 1 when a goal is
    missed. Takes about 8 minutes for the embedded model on 2 cores. The last line is JSON.
    """
    from bench.engine_speed import report
    from bench.engine_speed.measure import measure
    from bench.engine_speed.profile import outside_share, profile_json, profile_table
    from bench.peers.driver import machine_cpu_seconds
    from deployments.cli.real_engine import real_engine

    rows = chosen_rows(row)
    check_rounds(rounds)
    check_folder(save)
    config = measured_config(model, num_threads)
    console = Console(sys.stderr)
    with ExitStack() as stack:
        running = stack.enter_context(real_engine(config, console.doing))
        meter = stack.enter_context(limits_meter(num_threads))
        measured = measure(
            rows,
            [own_side(running)],
            meter,
            machine_cpu_seconds,
            settle,
            rounds=rounds,
            fewer_rounds={},
            vocab_size=running.shape.vocab_size,
            progress=console.doing,
        )
        name = running.card.name
    profiled = _profile(config, console) if profile else []
    share = outside_share(profiled, report.OUTSIDE_SEQS)
    document = {
        "bench": "engine",
        "title": f"Our engine on {name}, float32, against the machine's limits",
        "command": command("bench-engine", rounds, row),
        "model": name,
        "limits": report.limits_json(measured),
        "rows": report.engine_rows(measured),
        "disturbance_cores": round(measured.disturbance, 3),
        "profile": profile_json(profiled),
    }
    tables = report.engine_table(measured)
    if profiled:
        tables += ["", "Where the time of a step goes, with spans around its parts (which slow it a little):", ""]
        tables += profile_table(profiled)
    return finish(document, tables, report.engine_goals(measured, share), save, label)


def _profile(config: EngineConfig, console: Console) -> list[StepKind]:
    """In a process of its own, so that no span is near the measurement before."""
    from bench.engine_speed.profile import PROFILED, detokenise_s, kinds, read_steps
    from bench.engine_speed.rows import prompts
    from bench.engine_speed.sides import OwnSide
    from deployments.cli.real_engine import ProfiledModel, real_engine

    with TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        with real_engine(config, console.doing, ProfiledModel(str(path))) as running:
            side = OwnSide(running, running.pid, None)
            runs = []
            for number, row in enumerate(PROFILED):
                console.doing(f"profiling {row}")
                runs.append(side.run(row, prompts(row, running.shape.vocab_size, number)))
            text_s = detokenise_s(Path(running.card.folder), runs[2].outputs, time.thread_time)
        return kinds(read_steps(path), text_s)
