"""A trace by the name of its shape: lengths, arrivals at the published rate (or another), shared prefixes.

Same shape, number, seed and rate: the same trace, in every process.
"""

from __future__ import annotations

import numpy as np

from bench.traces import arrivals, shapes
from bench.traces.trace import Trace, counts, seconds
from replica.errors import SettingError


def generate(shape: str, num_requests: int, seed: int, rate: float | None = None) -> Trace:
    """`rate`: requests per second; None: the published one. Raises SettingError."""
    if num_requests < 1:
        raise SettingError("num_requests", num_requests, "at least 1")
    rng = np.random.default_rng((seed, 1))
    if shape == "W2":
        prompts, outputs = shapes.azure_chat(num_requests, rng)
        times = arrivals.drifting(num_requests, rng, shape=0.93, drift=0.36, period=900.0)
        trace = Trace(shape, seed, seconds(times), counts(prompts), counts(outputs))
        return trace.at_rate(5.53 if rate is None else rate)
    raise SettingError("shape", shape, "W2")


def fixed_lengths(num_requests: int, seed: int, *, prompt_tokens: int, output_tokens: int) -> Trace:
    """All alike and all present: nothing for a scheduler to gain."""
    return spread_lengths(num_requests, seed, prompt_tokens=prompt_tokens, mean_output_tokens=output_tokens, spread=0.0)


def spread_lengths(
    num_requests: int,
    seed: int,
    *,
    prompt_tokens: int,
    mean_output_tokens: int,
    spread: float,
    long_share: float = 0.5,
) -> Trace:
    """Short and long answers, mixed at random, all present; the mean stays whatever the spread.

    `spread` from 0 (all alike) to 1: short ones have `mean * (1 - spread)` tokens, at least 1, and the long ones, a
    `long_share` of all, what keeps the mean (rounded to whole tokens).
    """
    if not 0.0 <= spread <= 1.0:
        raise SettingError("spread", spread, "from 0 to 1")
    if not 0.0 < long_share < 1.0:
        raise SettingError("long_share", long_share, "more than 0, less than 1")
    sizes = {"num_requests": num_requests, "prompt_tokens": prompt_tokens, "mean_output_tokens": mean_output_tokens}
    for name, value in sizes.items():
        if value < 1:
            raise SettingError(name, value, "at least 1")
    short = max(1, round(mean_output_tokens * (1.0 - spread)))
    long = round(short + (mean_output_tokens - short) / long_share)
    rng = np.random.default_rng((seed, 1))
    outputs = np.where(rng.random(num_requests) < long_share, long, short)
    name = f"spread-{spread:g}" if spread else "fixed"
    prompts = np.full(num_requests, prompt_tokens)
    return Trace(name, seed, seconds(np.zeros(num_requests)), counts(prompts), counts(outputs))
