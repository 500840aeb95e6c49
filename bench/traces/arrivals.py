"""When requests come: each function gives sorted seconds from 0 at a mean rate of 1 per second.

`generate.py` stretches them to the rate wanted, so a curve keeps its shape at any rate. What a function takes besides
`num` and `rng` is a length of time in units of the mean gap, or a number without a unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def poisson(num: int, rng: np.random.Generator) -> Times:
    return gamma(num, rng, shape=1.0)


def gamma(num: int, rng: np.random.Generator, *, shape: float) -> Times:
    """Gamma-distributed gaps: coefficient of variation 1 / sqrt(shape); below 1 more bursty than Poisson."""
    return _from_zero(np.cumsum(rng.gamma(shape, 1.0 / shape, num)))


def all_present(num: int, rng: np.random.Generator) -> Times:  # noqa: ARG001 - one signature for all
    return np.zeros(num)


def drifting(num: int, rng: np.random.Generator, *, shape: float, drift: float, period: float) -> Times:
    """Gamma gaps while the rate wanders slowly: its logarithm moves between independent normal values of standard
    deviation `drift`, one every `period`."""
    work = gamma(num, rng, shape=shape)
    num_knots = int(work[-1] / period) + 3 if num else 3
    level = np.exp(rng.normal(0.0, drift, num_knots))
    # Time that passes while one unit of work arrives is 1 / rate: integrate it over the work done.
    passed = np.concatenate(([0.0], np.cumsum((1.0 / level[:-1] + 1.0 / level[1:]) / 2.0))) * period
    return _from_zero(np.interp(work, np.arange(num_knots) * period, passed))


def bursts(
    num: int, rng: np.random.Generator, *, on: float, off: float, off_cv: float, level_shape: float, inside: float
) -> Times:
    """Silence and bursts by turns. A burst lasts `on` on average (exponential), at a rate of its own (Gamma with
    `level_shape`), with Gamma(`inside`) gaps; a silence lasts `off` on average (lognormal with this coefficient of
    variation: seconds mostly, minutes now and then)."""
    rate = (on + off) / on
    sigma2 = np.log1p(off_cv**2)
    parts: list[Times] = []
    clock = have = 0.0
    while have < num:
        length = rng.exponential(on)
        level = rate * rng.gamma(level_shape, 1.0 / level_shape)
        gaps = rng.gamma(inside, 1.0 / inside, int(length * level * 2) + 20) / max(level, 1e-9)
        times = np.cumsum(gaps)
        times = times[times < length]
        parts.append(clock + times)
        have += len(times)
        clock += length + float(rng.lognormal(np.log(off) - sigma2 / 2.0, np.sqrt(sigma2)))
    return _from_zero(np.concatenate(parts)[:num]) if parts else np.zeros(0)


def _from_zero(times: NDArray[Any]) -> Times:
    """The first request comes at once."""
    return times - times[0] if len(times) else times
