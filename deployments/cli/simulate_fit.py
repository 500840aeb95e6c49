"""`brimful simulate fit`: measure the steps of the real engine, fit what they cost, write the cost file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.console import Console, result_lines
from replica.errors import ResourceError, SettingError

if TYPE_CHECKING:
    from bench.fit.fitting import Fit
    from bench.fit.points_file import PointsFile
    from bench.simulate.step_cost import StepCost
    from replica.config import EngineConfig

Model = Annotated[str, typer.Option(help="'embedded', a hub id, a folder or a .gguf file")]
Seqs = Annotated[int, typer.Option(help="sequences in one step, at most")]
Tokens = Annotated[int, typer.Option(help="tokens in one step, at most")]
Device = Annotated[str, typer.Option(help="where the engine runs: cpu or cuda; the cost file says so")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the engine [default: all cores]")]


def fit(
    model: Model = "embedded",
    name: Annotated[str, typer.Option(help="name of the cost, for --cost")] = "cpu-smollm2",
    save: Annotated[Path | None, typer.Option(help="cost file to write [default: NAME.json]")] = None,
    save_points: Annotated[Path | None, typer.Option(help="file for the points [default: NAME-points.json]")] = None,
    refit: Annotated[Path | None, typer.Option(help="fit this file of points instead of measuring")] = None,
    rounds: Annotated[int, typer.Option(help="times that every micro-benchmark runs, at most")] = 3,
    limit_s: Annotated[float, typer.Option(help="begin no round that would end later than this, seconds")] = 360.0,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Tokens = 512,
    num_threads: Threads = None,
    device: Device = "cpu",
) -> int:
    """Measure steps of the real engine in micro-benchmarks and fit the simulator's step cost to them.

    Takes 4 to 7 minutes for the embedded model on 2 cores. The last line is JSON.
    """
    from bench.fit.fitting import fit_cost

    began_s = time.monotonic()
    if rounds < 1:
        raise SettingError("--rounds", rounds, "at least 1")
    if device not in ("cpu", "cuda"):
        raise SettingError("--device", device, "cpu or cuda")
    cost_path = _writable("--save", save or Path(f"{name}.json"))
    points_path = _writable("--save-points", save_points or Path(f"{name}-points.json"))
    if refit is not None:
        measured = _measured_before(refit)
    else:
        config = engine_config(model, max_num_seqs, max_num_batched_tokens, num_threads, device)
        measured = _measured(config, rounds, limit_s)
        _save("--save-points", points_path, measured)
    chosen, other = fit_cost(measured.points, measured.kv_granule_tokens, name, measured.source)
    chosen = replace(chosen, cost=replace(chosen.cost, device=measured.device))
    found = _told(measured, chosen, other)
    _save("--save", cost_path, chosen.cost)
    print(f"written: {cost_path}")
    print(json.dumps({"command": "simulate fit", **found, "wall_s": time.monotonic() - began_s}))
    return 0


def _told(measured: PointsFile, chosen: Fit, other: Fit) -> dict[str, Any]:
    """Prints tables and errors; returns what goes into the JSON."""
    from bench.fit.points_file import listed
    from bench.fit.reports import cost_table, points_table

    result_lines((*points_table(measured.points, chosen), "", *cost_table(chosen.cost)))
    noise = median(point.noise for point in measured.points)
    print(f"{listed(measured.points)}; equal steps differ by {noise:.1%} from their median")
    print(f"error: median {chosen.median:.1%}, rms {chosen.rms:.1%}")
    print(f"the other form ({'with' if other.cost.token_curve else 'without'} a curve): rms {other.rms:.1%}")
    return {
        "cost": asdict(chosen.cost),
        "num_points": len(measured.points),
        "num_steps": sum(point.num_samples for point in measured.points),
        "noise": noise,
        "median_error": chosen.median,
        "rms_error": chosen.rms,
        "other_form_rms_error": other.rms,
    }


def _save(flag: str, path: Path, what: PointsFile | StepCost) -> None:
    try:
        what.save(path)
    except OSError as error:
        raise SettingError(flag, str(path), f"a file that can be written ({error.strerror})") from None


def _writable(flag: str, path: Path) -> Path:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingError(flag, str(path), "a file in a folder that exists")
    return path


def engine_config(
    model: str, max_num_seqs: int, max_num_batched_tokens: int, num_threads: int | None, device: str
) -> EngineConfig:
    """Of an engine to be measured, whose queue refuses nobody and lets nobody expire. Raises `SettingError`."""
    from bench.simulate.requests import QUEUE_WITHOUT_BOUNDS
    from deployments.cli.flags import in_flag_terms
    from replica.config import EngineConfig, ModelConfig, SchedulerConfig

    given = {
        "model": model,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_threads": num_threads,
    }
    try:
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **QUEUE_WITHOUT_BOUNDS
        )
        return EngineConfig(model=ModelConfig(model=model, num_threads=num_threads, device=device), scheduler=limits)
    except SettingError as error:
        raise in_flag_terms(error, given) from None


def _measured_before(path: Path) -> PointsFile:
    from bench.fit.points_file import PointsFile

    try:
        measured = PointsFile.load(path)
    except SettingError as error:
        raise SettingError("--refit", str(path), error.message.partition(": ")[2]) from None
    if len({point.work for point in measured.points}) < 2:
        raise SettingError("--refit", str(path), "a file with at least two points that differ")
    return measured


def _rounds(most: int, limit_s: float) -> Iterator[int]:
    """0, 1, ... while one more round, as long as those before, would end within `limit_s`. One at least."""
    began_s = time.monotonic()
    for number in range(most):
        took_s = time.monotonic() - began_s
        if number and took_s * (number + 1) / number > limit_s:
            return
        yield number


def _measured(config: EngineConfig, rounds: int, limit_s: float) -> PointsFile:
    from bench.fit.micro import MicroBenchmarks, micro_benchmarks
    from bench.fit.points_file import PointsFile
    from deployments.cli.real_engine import real_engine

    console = Console(sys.stderr)
    with real_engine(config, console.doing) as engine:
        benchmarks = micro_benchmarks(config.scheduler, engine.shape.max_model_len)

        def progress(number: int, place: int, name: str) -> None:
            console.doing(f"measuring steps: round {number + 1}/{rounds}, {place + 1}/{len(benchmarks)}: {name}")

        try:
            points = MicroBenchmarks(engine).measure(benchmarks, _rounds(rounds, limit_s), progress)
        except ValueError as error:
            raise ResourceError(f"the steps can't be measured: {error}") from error
        limits = config.scheduler
        source = (
            f"measured with brimful simulate fit: model {config.model.model}, {os.cpu_count()} cores, "
            f"{limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens a step"
        )
        return PointsFile(source, engine.shape.block_size, tuple(points), config.model.device)
