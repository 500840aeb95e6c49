"""A `StepCost` from measured points: non-negative least squares on the relative error.

Two forms are fitted. The linear one has fixed seconds and a price for each prefill token. The curved one has a curve
over all tokens of a step in the place of both: its seconds at each knot are unknowns, so that a CPU's change of kernel
at some number of rows can show. It has more unknowns, so it is chosen only when it lowers the error by a fifth.

Every point counts the same whatever its seconds are, since each row of the system is divided by them. A point far off
the others (a neighbour took the core) counts less: after each solution, points beyond twice the median error are
weighted down in proportion (Huber), a few times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.fit.micro import REFERENCE_NAMES, Point
from bench.simulate.step_cost import StepCost, StepWork
from replica.errors import SettingError

_REWEIGHTINGS = 10
_CURVE_MUST_GAIN = 0.8
_KNOTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
_TINY_S = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """`errors[i]` is (predicted - measured) / measured of point i; `num_unknowns` the free numbers of the form."""

    cost: StepCost
    errors: tuple[float, ...]
    num_unknowns: int

    @property
    def rms(self) -> float:
        """Of the relative errors, by degrees of freedom."""
        free = max(1, len(self.errors) - self.num_unknowns)
        return sqrt(sum(error * error for error in self.errors) / free)

    @property
    def median(self) -> float:
        return median(map(abs, self.errors))


def fit_cost(points: Sequence[Point], kv_granule_tokens: int, name: str, source: str) -> tuple[Fit, Fit]:
    """The form to use, and the other one. Raises `SettingError` for points that can't be fitted."""
    if len({point.work for point in points}) < 2:
        raise SettingError("points", len(points), "at least two that differ")
    linear = _fit(points, (), kv_granule_tokens, name, source)
    knots = _knots(points)
    if len(knots) < 2:
        return linear, linear
    curved = _fit(points, knots, kv_granule_tokens, name, source)
    return (curved, linear) if curved.rms < _CURVE_MUST_GAIN * linear.rms else (linear, curved)


def errors_of(cost: StepCost, points: Sequence[Point]) -> tuple[float, ...]:
    """(predicted - measured) / measured of each point."""
    return tuple(cost.seconds(point.work) / point.seconds - 1.0 for point in points)


def speed_of(cost: StepCost, points: Sequence[Point]) -> float:
    """How many times as long as predicted these steps took."""
    return median(point.seconds / cost.seconds(point.work) for point in points)


def _fit(points: Sequence[Point], knots: tuple[int, ...], granule: int, name: str, source: str) -> Fit:
    columns = np.array([_columns(point.work, knots) for point in points])
    seconds = np.array([point.seconds for point in points])
    weights = np.ones(len(points))
    solution = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        scale = weights / seconds
        solution = nonnegative_least_squares(columns * scale[:, None], weights)
        errors = np.abs(columns @ solution / seconds - 1.0)
        limit = max(2.0 * float(np.median(errors)), 1e-12)
        weights = np.sqrt(limit / np.maximum(errors, limit))
    cost = _cost(solution, knots, granule, name, source)
    reference = [point for point in points if point.benchmark in REFERENCE_NAMES]
    cost = replace(cost, reference_ratio=speed_of(cost, reference) if reference else 1.0)
    return Fit(cost, errors_of(cost, points), int((columns.sum(axis=0) > 0).sum()))


def _columns(work: StepWork, knots: tuple[int, ...]) -> list[float]:
    """What each unknown is multiplied by. Without knots: fixed, prefill tokens; with them: each knot's share."""
    num_prefill, num_decodes, num_read, num_pairs, num_chunks = work
    rest = [float(num_decodes), float(num_read), num_pairs, float(num_chunks)]
    if not knots:
        return [*rest, 1.0, float(num_prefill)]
    return [*rest, *_shares(num_prefill + num_decodes, knots)]


def _shares(num_tokens: int, knots: tuple[int, ...]) -> list[float]:
    """How much of each knot's seconds a step of so many tokens takes: two neighbours share it, in straight lines."""
    return [float(np.interp(num_tokens, knots, line)) for line in np.eye(len(knots))]


def _knots(points: Sequence[Point]) -> tuple[int, ...]:
    """Numbers of tokens at which some point lies: the usual ones, and the least and the most."""
    sizes = {point.work.num_prefill_tokens + point.work.num_decode_seqs for point in points}
    return tuple(sorted(sizes & ({min(sizes), max(sizes)} | set(_KNOTS))))


def _cost(solution: Floats, knots: tuple[int, ...], granule: int, name: str, source: str) -> StepCost:
    decode_s, kv_s, pair_s, chunk_s, *base = solution.tolist()
    if knots:
        fixed_s, prefill_s = min(base), 0.0
        curve = tuple((knot, seconds - fixed_s) for knot, seconds in zip(knots, base, strict=True))
    else:
        (fixed_s, prefill_s), curve = base, ()
    return StepCost(
        fixed_s=max(fixed_s, _TINY_S),
        prefill_token_s=prefill_s,
        decode_seq_s=decode_s,
        kv_token_s=kv_s,
        prefill_pair_s=pair_s,
        chunk_s=chunk_s,
        kv_granule_tokens=granule,
        token_curve=curve,
        name=name,
        source=source,
    )


def nonnegative_least_squares(matrix: Floats, wanted: Floats) -> Floats:
    """The x >= 0 that makes |matrix x - wanted| least (Lawson and Hanson's active set).

    Columns enter one at a time, the one whose growth helps most first; whenever the unconstrained solution over the
    entered ones has a negative part, the way towards it is cut where the first part reaches 0, and that one leaves.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    solution = np.zeros(matrix.shape[1])
    entered = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * matrix.shape[1]):
        gain = scaled.T @ (wanted - scaled @ solution)
        gain[entered] = 0.0
        if gain.max() <= 1e-10 * max(1.0, float(np.abs(wanted).max())):
            break
        entered[int(gain.argmax())] = True
        while True:
            trial = np.zeros_like(solution)
            trial[entered] = np.linalg.lstsq(scaled[:, entered], wanted, rcond=None)[0]
            below = entered & (trial <= 0)
            if not below.any():
                solution = trial
                break
            step = float((solution[below] / (solution[below] - trial[below])).min())
            solution += step * (trial - solution)
            entered &= solution > 1e-14
            solution[~entered] = 0.0
    return solution / np.where(lengths > 0, lengths, 1.0)
