"""Token counts by inverse CDF: a quantile grid says what share of requests is at most how long.

Between two grid points the logarithm of the length is interpolated. No fitted curve stands in for a grid: a lognormal
misses these distributions visibly (several are two-humped).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.traces.trace import QUANTILES

Counts = NDArray[np.int64]
Levels = tuple[float, ...]


def from_grid(uniform: NDArray[Any], grid: Levels, levels: Levels = QUANTILES) -> Counts:
    """The lengths at these places (0 to 1) of the distribution, whole tokens, at least 1."""
    logs = np.interp(uniform * 100.0, levels, np.log(np.asarray(grid, np.float64)))
    return np.maximum(1, np.rint(np.exp(logs)).astype(np.int64))


def ranks(values: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float64]:
    """Each value's place (0 to 1) among all; ties in random order."""
    place = np.empty(len(values))
    place[np.lexsort((rng.random(len(values)), values))] = np.arange(len(values))
    return (place + 0.5) / max(1, len(values))


def correlated(num: int, rng: np.random.Generator, rho: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two columns of uniform places, tied by a normal copula of this correlation."""
    first, second = rng.normal(size=num), rng.normal(size=num)
    return ranks(first, rng), ranks(rho * first + np.sqrt(1.0 - rho * rho) * second, rng)


def tied_to(places: NDArray[np.float64], rng: np.random.Generator, rho: float) -> NDArray[np.float64]:
    """Uniform places tied to these: the same copula, one of whose columns is given."""
    normal = np.empty(len(places))
    normal[np.argsort(places)] = np.sort(rng.normal(size=len(places)))
    return ranks(rho * normal + np.sqrt(1.0 - rho * rho) * rng.normal(size=len(places)), rng)


def zipf_probabilities(exponent: float, below: int) -> NDArray[np.float64]:
    """Probability of 1, 2 ... below - 1."""
    weights = np.arange(1, below, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def zipf(num: int, rng: np.random.Generator, exponent: float, below: int) -> Counts:
    cumulative = np.cumsum(zipf_probabilities(exponent, below))
    return np.minimum(np.searchsorted(cumulative, rng.random(num)), below - 2).astype(np.int64) + 1
