"""The published length distributions. README.md says where each comes from and under which licence.

Grids are token counts at the levels of `trace.QUANTILES`.
"""

from __future__ import annotations

import numpy as np

from bench.traces.lengths import Counts, from_grid, ranks
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
    levels, grid = zip(*sorted([*zip(QUANTILES, AZURE_CHAT_IN, strict=True), *AZURE_CHAT_IN_CLASSES]), strict=True)
    prompts = from_grid(rng.random(num), grid, levels)
    place = rng.random(num)
    rough = np.zeros(num)
    low = 0
    for high, p10, p50, p90 in AZURE_CHAT_CLASSES:
        inside = (prompts >= low) & (prompts < high)
        grid = (p10 / 3, p10, p50, p90, p90 * 2)
        rough[inside] = np.interp(place[inside] * 100.0, AZURE_CHAT_CLASS_LEVELS, np.log(grid))
        low = high
    return prompts, from_grid(ranks(rough, rng), AZURE_CHAT_OUT)
