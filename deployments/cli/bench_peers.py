"""`brimful bench peers`: our engine beside vLLM on the CPU and transformers' own continuous batching, in turn."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
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
    environment_with,
    finish,
    limits_meter,
    measured_config,
    num_cores,
    own_side,
    settle,
)
from deployments.cli.console import Console
from replica.child_process import WAITING
from replica.errors import ResourceError, SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.engine_speed.measure import Measured
    from bench.engine_speed.rows import Row
    from bench.engine_speed.sides import PeerSide
    from replica.model_card import ModelCard

_VLLM_KV_GIB = 3
_SPARE_PAGES = 8


def peers(
    peer_python: Annotated[str, typer.Option(help="interpreter of an environment with vllm; none: without vLLM")] = "",
    transformers_rounds: Annotated[int, typer.Option(help="rounds of transformers, 0: none; it is slow")] = 1,
    model: Model = "embedded",
    row: RowFlag = None,
    rounds: Rounds = 3,
    num_threads: Threads = None,
    save: Save = None,
    label: Label = "",
) -> int:
    """Measure our engine beside its peers on this machine: the same model, precision, threads and requests, in turn.

    Exit code 1 when a goal is missed. Takes about 25 minutes for the embedded model on 2 cores, of which vLLM's start
    is 3. The last line is JSON.
    """
    from bench.engine_speed.measure import measure
    from bench.peers.driver import DriverFailed, machine_cpu_seconds
    from deployments.cli.real_engine import real_engine

    rows = chosen_rows(row)
    check_rounds(rounds)
    check_folder(save)
    if not peer_python and not transformers_rounds:
        raise SettingError("--peer-python", peer_python, "an interpreter with vllm (make peer-vllm), or transformers")
    config = measured_config(model, num_threads)
    console = Console(sys.stderr)
    try:
        with ExitStack() as stack:
            running = stack.enter_context(real_engine(config, console.doing))
            meter = stack.enter_context(limits_meter(num_threads))
            others: list[PeerSide] = []
            if peer_python:
                console.doing("starting vLLM (two minutes or more)")
                others.append(_vllm(stack, peer_python, running.card))
            if transformers_rounds:
                console.doing("starting transformers")
                others.append(_transformers(stack, running.card, rows, num_threads or num_cores()))
            measured = measure(
                rows,
                [own_side(running), *others],
                meter,
                machine_cpu_seconds,
                settle,
                rounds=rounds,
                fewer_rounds={"transformers": transformers_rounds},
                vocab_size=running.shape.vocab_size,
                progress=console.doing,
            )
            name = running.card.name
    except DriverFailed as error:
        raise ResourceError(f"a peer failed: {error}") from error
    return _told(name, command("bench-peers PEER_PYTHON=...", rounds, row), measured, others, save, label)


def _told(model: str, again: str, measured: Measured, others: Sequence[PeerSide], save: Path | None, label: str) -> int:
    from bench.engine_speed import report

    names = [other.name for other in others]
    document = {
        "bench": "peers",
        "title": f"Our engine beside its peers on {model}, float32",
        "command": again,
        "model": model,
        "versions": {other.name: other.version for other in others},
        "limits": report.limits_json(measured),
        "rows": report.peers_rows(measured, names),
        "ours": report.engine_rows(measured),
        "busy_beside": round(measured.busy_beside, 4),
        "disturbance_cores": round(measured.disturbance, 3),
    }
    tables = [*report.peers_table(measured, names), "", *report.engine_table(measured)]
    return finish(document, tables, report.peers_goals(measured, names), save, label)


def _vllm(stack: ExitStack, python: str, card: ModelCard) -> PeerSide:
    """vLLM keeps a core for itself unless it is told which to use, and looks for the model in the net unless told not
    to."""
    from bench.engine_speed.sides import PeerSide
    from bench.peers.driver import driver

    cores = sorted(os.sched_getaffinity(0))
    together = cores == list(range(cores[0], cores[-1] + 1))
    environment = environment_with(
        {
            "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}" if together else ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
            "HF_HUB_OFFLINE": "1",
        }
    )
    started = [python, "-m", "bench.engine_speed.vllm_driver", card.weights_dir]
    return PeerSide("vllm", stack.enter_context(driver("vllm", started, environment)))


def _transformers(stack: ExitStack, card: ModelCard, rows: Sequence[Row], num_threads: int) -> PeerSide:
    from bench.engine_speed.sides import PeerSide
    from bench.engine_speed.transformers_driver import PAGE_SIZE
    from bench.peers.driver import driver

    pages = max(row.num_seqs * -(-(row.num_prompt_tokens + row.num_output_tokens) // PAGE_SIZE) for row in rows)
    seqs = max(row.num_seqs for row in rows)
    numbers = [str(number) for number in (num_threads, seqs, pages + _SPARE_PAGES)]
    started = [sys.executable, "-m", "bench.engine_speed.transformers_driver", card.weights_dir, *numbers]
    environment = environment_with({"HF_HUB_OFFLINE": "1", **WAITING})
    return PeerSide("transformers", stack.enter_context(driver("transformers", started, environment)))
