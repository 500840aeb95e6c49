"""`brimful simulate validate`: the same loads on the real engine and in the simulator, side by side."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from deployments.cli.console import Console, result_lines
from deployments.cli.simulate_cost import given_cost
from deployments.cli.simulate_fit import Model, Seqs, Threads, Tokens, engine_config
from replica.errors import ResourceError, SettingError

EXIT_OUTSIDE = 1


def validate(
    cost: Annotated[str, typer.Option(help="a preset or a cost file, fitted on this machine")] = "cpu-smollm2",
    model: Model = "embedded",
    seconds: Annotated[float, typer.Option(help="work in each play of a load, seconds of the engine's time")] = 20.0,
    rounds: Annotated[int, typer.Option(help="times that each load is played, odd; the middle one counts")] = 3,
    load: Annotated[list[str] | None, typer.Option(help="only this load; may be repeated [default: all]")] = None,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Tokens = 512,
    num_threads: Threads = None,
) -> int:
    """Run three loads that the fit never saw on the real engine and in the simulator, and compare.

    Exit code 1 when TTFT p50 or throughput of a load differ by more than 15 %. Takes about 5 minutes for the embedded
    model on 2 cores. The last line is JSON.
    """
    from bench.fit.reports import validation_table
    from bench.fit.validation import LOADS, TOLERANCE
    from bench.fit.validation import validate as compare
    from deployments.cli.real_engine import real_engine

    began_s = time.monotonic()
    if not 1.0 <= seconds <= 3600.0:
        raise SettingError("--seconds", seconds, "from 1 to 3600")
    if not 1 <= rounds <= 99 or rounds % 2 == 0:
        raise SettingError("--rounds", rounds, "odd, from 1 to 99")
    names = [known.name for known in LOADS]
    for given in load or ():
        if given not in names:
            raise SettingError("--load", given, f"one of {', '.join(names)}")
    step_cost = given_cost(cost)
    config = engine_config(model, max_num_seqs, max_num_batched_tokens, num_threads, step_cost.device or "auto")
    console = Console(sys.stderr)
    with real_engine(config, console.doing) as engine:
        chosen = tuple(known for known in LOADS if load is None or known.name in load)
        try:
            found = compare(engine, step_cost, seconds, console.doing, chosen, rounds)
        except ValueError as error:
            raise ResourceError(f"the steps can't be measured: {error}") from error
    result_lines(validation_table(found))
    agrees = all(comparison.agrees for comparison in found)
    result = {
        "command": "simulate validate",
        "cost": step_cost.name,
        "tolerance": TOLERANCE,
        "agrees": agrees,
        "loads": [comparison.as_json() for comparison in found],
        "wall_s": time.monotonic() - began_s,
    }
    print(json.dumps(result))
    return 0 if agrees else EXIT_OUTSIDE
