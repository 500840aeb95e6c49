"""`brimful bench http`: the engine alone against the same model behind HTTP, in turn."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
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
    finish,
    num_cores,
    settle,
)
from deployments.cli.console import Console

if TYPE_CHECKING:
    from bench.engine_speed.rows import Row
    from bench.http.sides import HttpSide
    from replica.config import EngineConfig

TWO_HOPS, ONE_HOP = "http", "http without the proxy"
HOST = "127.0.0.1"
SERVED_NAME = "measured"


def http(
    model: Model = "embedded",
    row: RowFlag = None,
    quick: Annotated[bool, typer.Option("--quick", help="few and short answers, one round: does it work?")] = False,
    rounds: Rounds = 3,
    num_threads: Threads = None,
    save: Save = None,
    label: Label = "",
) -> int:
    """Measure what HTTP, Ray Serve and our own edge cost: the engine alone against `brimful serve` with it, in turn.

    At 1, 32 and 64 streams: output tokens a second, the time to the first token, the times between tokens, and the CPU
    time of each kind of process, the load client's too. Exit code 1 when a goal is missed. Takes about 8 minutes for
    the embedded model on 2 cores. The last line is JSON.
    """
    from bench.http import report
    from bench.http.measure import measure
    from bench.http.sides import EngineSide
    from bench.peers.driver import DriverFailed, machine_cpu_seconds
    from deployments.cli.real_engine import real_engine
    from replica.errors import ResourceError

    rows = _rows(row, quick)
    rounds = 1 if quick else rounds
    check_rounds(rounds)
    check_folder(save)
    config = _config(model, num_threads)
    console = Console(sys.stderr)
    try:
        with ExitStack() as stack:
            running = stack.enter_context(real_engine(config, console.doing))
            behind_http = _behind_http(stack, config, console)
            sides = [side.name for side in behind_http]
            measured = measure(
                rows,
                [EngineSide(running, running.pid), *behind_http],
                machine_cpu_seconds,
                settle,
                rounds=rounds,
                vocab_size=running.shape.vocab_size,
                progress=console.doing,
            )
            name = running.card.name
            console.doing("stopping the service")
    except DriverFailed as error:
        raise ResourceError(str(error)) from error
    document = {
        "bench": "http",
        "title": f"{name}, float32: the engine alone and behind HTTP, over two hops of Ray and over one",
        "command": _command(row, rounds, quick),
        "model": name,
        "rows": report.rows_json(measured, sides),
        "disturbance_cores": round(measured.disturbance, 3),
    }
    return finish(document, report.tables(measured, sides), report.goals(measured, sides), save, label)


def _behind_http(stack: ExitStack, config: EngineConfig, console: Console) -> list[HttpSide]:
    """The same engine behind `brimful serve`, and the load client; both end with `stack`.

    Serve's proxy is the way in that we ship. Ray's "direct ingress" lets the ingress process listen, too, on a port of
    its own: the same service without that hop.
    """
    from bench.http.processes import cpu_by_kind
    from bench.http.sides import HttpSide
    from bench.peers.driver import driver
    from deployments.cli.bench_service import free_port, running_service

    port, direct_port = free_port(HOST), free_port(HOST)
    direct = {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(direct_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(direct_port + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    flags = ["--host", HOST, "--port", str(port), "--model", config.model.model, "--served-model-name", SERVED_NAME]
    flags += ["--device", "cpu", "--num-threads", str(config.model.num_threads)]
    service = stack.enter_context(running_service(flags, console.doing, direct))
    client = stack.enter_context(driver("the load client", [sys.executable, "-m", "bench.http.client_driver"]))
    processes = partial(cpu_by_kind, service.pid)
    ways = {TWO_HOPS: port, ONE_HOP: direct_port}
    return [HttpSide(name, (HOST, number), SERVED_NAME, client, processes) for name, number in ways.items()]


def _rows(given: list[str] | None, quick: bool) -> tuple[Row, ...]:
    """Raises `SettingError`."""
    from bench.http.measure import QUICK_ROWS, ROWS

    return chosen_rows(given) if given is not None else QUICK_ROWS if quick else ROWS


def _command(given: list[str] | None, rounds: int, quick: bool) -> str:
    flags = ["--quick" if quick else f"--rounds {rounds}", *(f"--row {text}" for text in given or ())]
    return f'make bench-http ARGS="{" ".join(flags)}"'


def _config(model: str, num_threads: int | None) -> EngineConfig:
    """The engine as `brimful serve --device cpu` runs it. Raises `SettingError`."""
    from deployments.cli.flags import serve_config
    from deployments.machine import Machine

    given = {"model": model, "device": "cpu", "num_threads": num_threads or num_cores()}
    settings = serve_config(None, given).app.models[0]
    return settings.engine_config(Machine(node_cpus=(float(num_cores()),)), 1)
