"""A trace by the name of its shape: lengths, arrivals at the published rate (or another), shared prefixes.

Same shape, number, seed and rate: the same trace, in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.traces import arrivals, shapes
from bench.traces.arrivals import Times
from bench.traces.lengths import Counts
from bench.traces.prefixes import Blocks, groups
from bench.traces.trace import Trace, counts, seconds
from replica.errors import SettingError

Arrivals = Callable[[int, np.random.Generator], Times]


class Shape(NamedTuple):
    """`rate`: requests per second as published; None: none is, all requests are there at once. `blocks` takes the
    prompts' lengths."""

    what: str
    lengths: Callable[[int, np.random.Generator], shapes.Columns]
    arrivals: Arrivals
    rate: float | None
    blocks: Callable[[Counts, np.random.Generator], Blocks] | None = None
    block_tokens: int = 0


def _grouped(num_groups: int, num_blocks: int) -> Callable[[Counts, np.random.Generator], Blocks]:
    return lambda prompts, rng: groups(len(prompts), rng, num_groups=num_groups, num_blocks=num_blocks)


_CODE_BURSTS: Arrivals = partial(arrivals.bursts, on=16.7, off=45.0, off_cv=2.1, level_shape=1.6, inside=1.0)
_CHAT_DRIFT: Arrivals = partial(arrivals.drifting, shape=0.93, drift=0.36, period=900.0)
_BURSTGPT: Arrivals = partial(arrivals.gamma, shape=0.5)
_SHAREGPT = partial(shapes.filtered_lognormal, mean_in=161.31, mean_out=337.99)
_ALPACA = partial(shapes.filtered_lognormal, mean_in=19.31, mean_out=58.45)

SHAPES = {
    "W1": Shape("Azure code, 2023", shapes.azure_code, _CODE_BURSTS, 2.57),
    "W2": Shape("Azure conversation, 2023", shapes.azure_chat, _CHAT_DRIFT, 5.53),
    "W2-burst": Shape("lengths of W2, arrivals of W1", shapes.azure_chat, _CODE_BURSTS, 5.53),
    "W3": Shape("Azure conversation, 2024: its mean rate, lengths of W2", shapes.azure_chat, arrivals.poisson, 45.1),
    "W3-code": Shape("Azure code, 2024: its mean rate, lengths of W1", shapes.azure_code, arrivals.poisson, 27.8),
    "W4": Shape(
        "Mooncake conversation", shapes.mooncake_chat, arrivals.poisson, 3.40, shapes.mooncake_chat_blocks, 512
    ),
    "W5": Shape(
        "Mooncake synthetic", shapes.mooncake_synthetic, arrivals.poisson, 3.9, shapes.mooncake_synthetic_blocks, 512
    ),
    "W6": Shape("ShareGPT as vLLM filters it", _SHAREGPT, arrivals.poisson, 1.0),
    "W6-alpaca": Shape("Alpaca as vLLM filters it", _ALPACA, arrivals.poisson, 1.0),
    "W7": Shape("BurstGPT's model: Gamma gaps, Zipf lengths", shapes.burstgpt, _BURSTGPT, 1.0),
    "W8": Shape("vLLM bench serve, random", partial(shapes.constant, prompt=1024, output=128), arrivals.poisson, None),
    "W8-sglang": Shape(
        "SGLang bench_serving, random", partial(shapes.uniform, prompt=1024, output=1024), arrivals.poisson, None
    ),
    "W8-prefix-repetition": Shape(
        "vLLM bench serve, prefix_repetition",
        partial(shapes.constant, prompt=512, output=128),
        arrivals.poisson,
        None,
        _grouped(10, 4),
        64,
    ),
    "W8-shared-prefix": Shape(
        "SGLang bench_serving, generated-shared-prefix",
        partial(shapes.constant, prompt=2176, output=256),
        arrivals.poisson,
        None,
        _grouped(64, 16),
        128,
    ),
    "W8-herding": Shape(
        "1000 in, 1000 out, all alike", partial(shapes.constant, prompt=1000, output=1000), arrivals.poisson, None
    ),
}


def generate(shape: str, num_requests: int, seed: int, rate: float | None = None) -> Trace:
    """A trace of one of `SHAPES`. `rate`: requests per second; None: the published one. Raises SettingError."""
    if shape not in SHAPES:
        raise SettingError("shape", shape, f"one of {', '.join(SHAPES)}")
    if num_requests < 1:
        raise SettingError("num_requests", num_requests, "at least 1")
    chosen = SHAPES[shape]
    rng = np.random.default_rng((seed, 1))
    prompts, outputs = chosen.lengths(num_requests, rng)
    rate = chosen.rate if rate is None else rate
    times = arrivals.all_present(num_requests, rng) if rate is None else chosen.arrivals(num_requests, rng)
    blocks = chosen.blocks(prompts, rng) if chosen.blocks else ()
    trace = Trace(shape, seed, seconds(times), counts(prompts), counts(outputs), blocks, chosen.block_tokens)
    return trace if rate is None or num_requests == 1 else trace.at_rate(rate)


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
