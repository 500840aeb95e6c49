"""The published length distributions. README.md says where each comes from and under which licence.

Grids are token counts at the levels of `trace.QUANTILES`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.traces.lengths import Counts, correlated, from_grid, ranks, tied_to, zipf
from bench.traces.prefixes import Blocks, conversations
from bench.traces.trace import QUANTILES

Columns = tuple[Counts, Counts]

AZURE_CHAT_IN = (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050)
AZURE_CHAT_IN_CLASSES = ((27.0, 400), (42.0, 900), (78.0, 1300), (91.0, 3000))
"""More points of the same distribution: the published shares of the classes below."""
AZURE_CHAT_OUT = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000)
AZURE_CHAT_CLASSES = (
    # prompts below, output at 10, 50 and 90 %
    (400, 52, 98, 194),
    (900, 80, 99, 143),
    (1300, 365, 403, 478),
    (3000, 51, 107, 204),
    (1 << 31, 35, 57, 130),
)
AZURE_CHAT_CLASS_LEVELS = (0.0, 10.0, 50.0, 90.0, 100.0)


def azure_chat(num: int, rng: np.random.Generator) -> Columns:
    """The output depends on the prompt: first the prompt, then an output of the prompt's class, then the outputs'
    ranks are laid on the published distribution of all outputs, which the classes alone miss by a little."""
    prompts = _from_more(rng.random(num), AZURE_CHAT_IN, *AZURE_CHAT_IN_CLASSES)
    place = rng.random(num)
    rough = np.zeros(num)
    low = 0
    for high, p10, p50, p90 in AZURE_CHAT_CLASSES:
        inside = (prompts >= low) & (prompts < high)
        grid = (p10 / 3, p10, p50, p90, p90 * 2)
        rough[inside] = np.interp(place[inside] * 100.0, AZURE_CHAT_CLASS_LEVELS, np.log(grid))
        low = high
    return prompts, from_grid(ranks(rough, rng), AZURE_CHAT_OUT)


AZURE_CODE_IN = (3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437)
AZURE_CODE_OUT = (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 1899)
AZURE_CODE_OUT_TAIL = (99.9, 600)
"""No published point, but the one that gives the published mean: the last hundredth is steeper than its ends say."""

MOONCAKE_CHAT_IN = (891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39550, 85400, 126195)
MOONCAKE_CHAT_OUT = (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1119, 2000)
MOONCAKE_SYNTHETIC_IN = (13, 16, 22, 30, 88, 913, 4365, 11587, 16290, 19409, 28425, 38611, 48905, 66456, 191378)
MOONCAKE_SYNTHETIC_OUT = (1, 2, 2, 4, 8, 16, 32, 69, 126, 210, 289, 389, 519, 768, 893)
MOONCAKE_BLOCK_TOKENS = 512

BURSTGPT_EXPONENT = 1.1
BURSTGPT_BELOW = 1024


def azure_code(num: int, rng: np.random.Generator) -> Columns:
    """Long prompts, tiny answers, independent of each other."""
    outputs = _from_more(rng.random(num), AZURE_CODE_OUT, AZURE_CODE_OUT_TAIL)
    return from_grid(rng.random(num), AZURE_CODE_IN), outputs


def mooncake_chat(num: int, rng: np.random.Generator) -> Columns:
    return from_grid(rng.random(num), MOONCAKE_CHAT_IN), from_grid(rng.random(num), MOONCAKE_CHAT_OUT)


def mooncake_chat_blocks(prompts: Counts, rng: np.random.Generator) -> Blocks:
    """One system prompt for all, and conversations."""
    shares = np.interp(rng.random(len(prompts)), (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.07, 0.33, 0.67, 1.0))
    ages = from_grid(rng.random(len(prompts)), (60, 420, 1400, 3800, 7000), (0, 20, 75, 97, 100))
    return conversations(prompts, MOONCAKE_BLOCK_TOKENS, shares, ages, rng, common=True, again=0.0)


def mooncake_synthetic(num: int, rng: np.random.Generator) -> Columns:
    """The longer the prompt, the shorter the answer."""
    place_in, place_out = correlated(num, rng, -0.55)
    return from_grid(place_in, MOONCAKE_SYNTHETIC_IN), from_grid(place_out, MOONCAKE_SYNTHETIC_OUT)


def mooncake_synthetic_blocks(prompts: Counts, rng: np.random.Generator) -> Blocks:
    """Nothing is common to all; more than half repeat nothing, the long ones nearly everything."""
    place = tied_to(ranks(prompts, rng), rng, 0.9)
    shares = np.interp(place, (0.0, 0.55, 0.551, 0.75, 1.0), (0.0, 0.0, 0.9, 0.98, 1.0))
    ages = from_grid(rng.random(len(prompts)), (40, 420, 1100, 1900, 2800), (0, 25, 75, 97, 100))
    return conversations(prompts, MOONCAKE_BLOCK_TOKENS, shares, ages, rng, common=False, again=0.1)


def filtered_lognormal(num: int, rng: np.random.Generator, *, mean_in: float, mean_out: float) -> Columns:
    """Only means are published: lognormal of sigma 1.2 with these means (an assumption), then vLLM's filter of the
    same data set: at least 4 tokens each, prompt at most 1024, both together at most 2048."""
    kept: list[Columns] = []
    have = 0
    while have < num:
        prompts, outputs = (
            np.rint(rng.lognormal(np.log(mean) - 0.72, 1.2, 2 * num + 16)).astype(np.int64)
            for mean in (mean_in, mean_out)
        )
        good = (prompts >= 4) & (outputs >= 4) & (prompts <= 1024) & (prompts + outputs <= 2048)
        kept.append((prompts[good], outputs[good]))
        have += int(good.sum())
    return np.concatenate([p for p, _ in kept])[:num], np.concatenate([o for _, o in kept])[:num]


def burstgpt(num: int, rng: np.random.Generator) -> Columns:
    return zipf(num, rng, BURSTGPT_EXPONENT, BURSTGPT_BELOW), zipf(num, rng, BURSTGPT_EXPONENT, BURSTGPT_BELOW)


def constant(num: int, rng: np.random.Generator, *, prompt: int, output: int) -> Columns:  # noqa: ARG001
    return np.full(num, prompt), np.full(num, output)


def uniform(num: int, rng: np.random.Generator, *, prompt: int, output: int) -> Columns:
    """From 1 to these lengths: range ratio 0 as SGLang means it."""
    return rng.integers(1, prompt + 1, num), rng.integers(1, output + 1, num)


def _from_more(places: NDArray[np.float64], grid: tuple[int, ...], *points: tuple[float, int]) -> Counts:
    """From a grid at `QUANTILES` and these further (level, length) points."""
    levels, lengths = zip(*sorted([*zip(QUANTILES, grid, strict=True), *points]), strict=True)
    return from_grid(places, lengths, levels)
