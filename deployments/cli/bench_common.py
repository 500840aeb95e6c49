"""What both `brimful bench` commands need: the engine as shipped, the machine's limits, rows from flags, results."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.console import result_lines
from replica.child_process import WAITING
from replica.errors import ResourceError, SettingError

if TYPE_CHECKING:
    from bench.engine_speed.limits import MachineLimits, ModelLoad
    from bench.engine_speed.rows import Row
    from bench.engine_speed.sides import OwnSide
    from deployments.cli.real_engine import RealEngine
    from replica.config import EngineConfig

EXIT_GOAL_MISSED = 1
_SETTLE_S = 1.3

Model = Annotated[str, typer.Option(help="'embedded', a hub id, a folder or a .gguf file")]
RowFlag = Annotated[
    list[str] | None, typer.Option(help="only this row, SEQSxPROMPT/OUTPUT; may be repeated [default: all]")
]
Rounds = Annotated[int, typer.Option(help="times that every row runs")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of every side [default: all cores]")]
Save = Annotated[Path | None, typer.Option(help="folder for the results as .json and .md, such as bench/results")]
Label = Annotated[str, typer.Option(help="last part of the names of saved files, such as 'before'")]


def chosen_rows(given: list[str] | None) -> tuple[Row, ...]:
    """Raises `SettingError`."""
    from bench.engine_speed.rows import ROWS, parse_row

    try:
        return ROWS if given is None else tuple(parse_row(text) for text in given)
    except ValueError:
        raise SettingError("--row", given, "such as 8x128/64: sequences, prompt and output tokens") from None


def command(name: str, rounds: int, given: list[str] | None) -> str:
    """The command that makes these numbers again."""
    flags = [f"--rounds {rounds}", *(f"--row {text}" for text in given or ())]
    return f'make {name} ARGS="{" ".join(flags)}"'


def check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise SettingError("--rounds", rounds, "at least 1")


def check_folder(save: Path | None) -> None:
    if save is not None and not save.is_dir():
        raise SettingError("--save", str(save), "a folder that exists")


def measured_config(model: str, num_threads: int | None) -> EngineConfig:
    """The engine as `brimful serve` runs it on the CPU, but for a queue that refuses nobody and no prefix cache."""
    from deployments.cli.simulate_fit import engine_config
    from replica.config import SchedulerConfig

    shipped = SchedulerConfig()
    config = engine_config(model, shipped.max_num_seqs, shipped.max_num_batched_tokens, num_threads, "cpu")
    return replace(config, scheduler=replace(config.scheduler, enable_prefix_caching=False))


def own_side(engine: RealEngine) -> OwnSide:
    from bench.engine_speed.sides import OwnSide

    return OwnSide(engine, engine.pid, model_load_of(engine))


def model_load_of(engine: RealEngine) -> ModelLoad:
    """Raises `ResourceError` for a model whose limits aren't known."""
    from bench.engine_speed.limits import model_load

    try:
        return model_load(Path(engine.card.weights_dir), engine.shape.kv_bytes_per_token)
    except (OSError, ValueError, KeyError) as error:
        raise ResourceError(f"what {engine.card.name} costs can't be told: {error}") from error


def settle() -> None:
    """Lets those that worked go to sleep: vLLM's processes look for more work for a second, OpenMP's threads less."""
    time.sleep(_SETTLE_S)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


class LimitsMeter:
    """Measures the machine in a process of its own, which waits in between."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def __call__(self) -> MachineLimits:
        from bench.engine_speed.limits import MachineLimits

        answer = self._ask(measure=True)
        return MachineLimits(answer["bandwidth"], answer["rate"])


@contextmanager
def limits_meter(num_threads: int | None) -> Iterator[LimitsMeter]:
    from bench.peers.driver import driver

    started = [sys.executable, "-m", "bench.engine_speed.machine_driver", str(num_threads or num_cores())]
    with driver("the machine's limits", started, environment_with(WAITING)) as machine:
        yield LimitsMeter(machine.ask)


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **changes}


def finish(
    document: dict[str, Any], tables: list[str], goals: dict[str, bool | None], save: Path | None, label: str
) -> int:
    """Prints tables, goals and, last, the document; keeps them where asked. The exit code says whether a goal was
    missed."""
    from bench.engine_speed import results
    from bench.engine_speed.report import goal_lines

    document = {
        **document,
        "date": results.today(),
        "machine": results.machine(),
        "versions": {**results.versions(), **document.get("versions", {})},
        "goals": goals,
    }
    result_lines([*tables, "", *goal_lines(goals)])
    if save is not None:
        try:
            paths = results.save(save, document, [*tables, "", *(f"    {line}" for line in goal_lines(goals))], label)
        except OSError as error:
            raise SettingError("--save", str(save), f"a folder that can be written ({error.strerror})") from None
        print("written: " + ", ".join(map(str, paths)))
    print(json.dumps(document))
    return EXIT_GOAL_MISSED if False in goals.values() else 0
