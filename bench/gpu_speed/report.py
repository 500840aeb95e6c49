"""The table and the JSON of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.engine_speed.limits import MachineLimits, ModelLoad
from bench.gpu_speed.measure import StepTime


def step_json(time: StepTime, load: ModelLoad, limits: MachineLimits) -> dict[str, Any]:
    """Shares are of the limits; `bound` says which of the two is the step's floor."""
    work = load.of_step(time.plan)
    floor_s = work.floor_s(limits)
    return {
        "step": time.kind.name,
        "rows": time.kind.width,
        "context": time.kind.context,
        "tokens": time.kind.width * time.kind.count,
        "step_ms": time.step_s * 1e3,
        "alone_ms": time.alone_s * 1e3,
        "tokens_per_s": time.kind.width * time.kind.count / time.step_s,
        "floor_ms": floor_s * 1e3,
        "share": floor_s / time.step_s,
        "bound": "memory" if work.num_bytes / limits.bandwidth >= work.num_ops / limits.rate else "arithmetic",
    }


def step_lines(steps: Sequence[dict[str, Any]], limits: MachineLimits) -> list[str]:
    lines = [
        f"memory {limits.bandwidth / 1e9:,.0f} GB/s, arithmetic {limits.rate / 1e12:,.2f} TFLOP/s, both of this run",
        f"{'step':38}{'ms':>9}{'alone':>9}{'tokens/s':>11}{'floor':>9}{'share':>7}  bound by",
    ]
    lines += [
        f"{step['step']:38}{step['step_ms']:9.2f}{step['alone_ms']:9.2f}{step['tokens_per_s']:11,.0f}"
        f"{step['floor_ms']:9.2f}{step['share']:7.0%}  {step['bound']}"
        for step in steps
    ]
    return lines
