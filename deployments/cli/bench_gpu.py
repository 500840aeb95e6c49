"""`brimful bench gpu`: steps of the model against the limits of the device.

On a machine with a GPU but without our full installation: `python -m deployments.cli.bench_gpu` from the root of the
project; it needs torch and transformers, no Ray. Alone among the commands it loads torch into its own process, because
what it times is a step and not an engine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import BrimfulError, SettingError
from replica.model.api import Progress

if TYPE_CHECKING:
    from bench.engine_speed.limits import ModelLoad
    from bench.gpu_speed.measure import StepTime

_CPU_BLOCKS = 64


def gpu(
    model: Annotated[str, typer.Option(help="shape: tiny, llama-1b or llama-8b [llama-1b on cuda]")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="auto, or one of the device's by name")] = "auto",
    enforce_eager: Annotated[bool, typer.Option(help="without captured graphs")] = False,
    repeats: Annotated[int, typer.Option(help="steps in a row, in each of three series")] = 20,
) -> int:
    """Time decode and prefill steps of a model with random weights, beside what the device could do at best.

    Bandwidth and rate are measured in the same run. The last line is JSON.
    """
    from bench.engine_speed.limits import MachineLimits
    from bench.gpu_speed.models import DEFAULT_MODEL, MODELS
    from bench.gpu_speed.report import step_json, step_lines
    from replica.model.device_limits import device_limits, device_name
    from replica.model.weights import choose_device

    if repeats < 1:
        raise SettingError("--repeats", repeats, "at least 1")
    kind = choose_device(device).type
    chosen = model or DEFAULT_MODEL[kind]
    if chosen not in MODELS:
        raise SettingError("--model", chosen, ", ".join(MODELS))
    began_s = time.monotonic()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", file=sys.stderr, flush=True)

    say(f"measuring the limits of {device_name(device)}")
    limits = MachineLimits(*device_limits(device, dtype))
    with TemporaryDirectory() as folder:
        config = ModelConfig(
            folder,
            device=device,
            dtype=dtype,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            num_blocks=_CPU_BLOCKS if kind == "cpu" else None,
        )
        times, load = _times(chosen, kind, config, repeats, say)
    steps = [step_json(timed, load, limits) for timed in times]
    print("\n".join(step_lines(steps, limits)))
    document = {
        "command": "bench gpu",
        "device": device_name(device),
        "model": chosen,
        "bytes_per_s": limits.bandwidth,
        "operations_per_s": limits.rate,
        "said": said,
        "steps": steps,
        "wall_s": time.monotonic() - began_s,
    }
    print(json.dumps(document))
    return 0


def _times(model: str, kind: str, config: ModelConfig, repeats: int, say: Progress) -> tuple[list[StepTime], ModelLoad]:
    """Of every step that fits, and what the model costs at least."""
    from bench.engine_speed.limits import model_load
    from bench.gpu_speed.measure import fill_pool, fits, time_step
    from bench.gpu_speed.models import LIMITS, MODELS, steps_on
    from replica.model.random_checkpoint import save_random
    from replica.model.runner import load_runner
    from replica.model.weights import choose_device, choose_dtype

    say(f"writing random weights in the shape of {model}")
    folder, limits = Path(config.model), LIMITS[kind]
    card = save_random(model, "llama", MODELS[model], folder, device=config.device, dtype=config.dtype)
    runner = load_runner(card, config, SchedulerConfig(*limits), progress=say)
    steps = [step for step in steps_on(kind) if fits(step, runner.shape, *limits)]
    say(f"filling the pool: {fill_pool(runner, steps, limits[1])} tokens")
    times = []
    for step in steps:
        times.append(time_step(runner, step, time.perf_counter, repeats))
        say(f"{step.name}: {times[-1].step_s * 1e3:.2f} ms")
    weight_bytes = choose_dtype(config.dtype, choose_device(config.device)).itemsize
    load = model_load(folder, runner.shape.kv_bytes_per_token, weight_bytes)
    runner.close()
    return times, load


def main() -> None:
    """Where the rest of the command line isn't installed."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(gpu)
    try:
        app()
    except BrimfulError as error:
        sys.stderr.write(f"error: {error.message}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
