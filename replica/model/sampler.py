"""Turns logits into tokens: greedy, temperature, top-k, top-p, for all rows of a step together.

Row by row the choice is a pure function of the row's logits, its sampling parameters and one number u in [0, 1), and
u is a hash of (seed, number of the draw): no generator with a state exists. So a token depends on no neighbour, and
a step that is run again, or a sequence that is computed again after a preemption, draws the same token.

    greedy (temperature < 1e-5)     the largest logit
    without top_k and top_p         smallest token whose cumulated probability, in token order, exceeds u
    with them                       the same over the kept tokens, in order of falling probability

Which of the three a row takes depends on its own parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replica.model.inputs import IntArray
from replica.model.transfers import to_device
from replica.scheduler.plan import JoinedSequence, StepPlan

GREEDY_TEMPERATURE = 1e-5
# Top-p looks at so many of a row's best tokens first; a row whose share they don't reach is sorted in full.
_NUCLEUS_WIDTH = 256

FloatArray = npt.NDArray[np.float64]


def uniform_draws(seeds: npt.NDArray[np.uint64], numbers: IntArray) -> FloatArray:
    """Uniform numbers in [0, 1), one per (seed, number of the draw): 53 bits of a twofold SplitMix64 hash."""
    state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
    state = _mix(state ^ (numbers.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x632BE59BD9B4E019)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class Sampler:
    """Sampling parameters by lane, and the choice of tokens. `vocab_size` cuts off padding of the logits."""

    def __init__(self, num_lanes: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._temperature = np.zeros(num_lanes)
        self._top_k = np.zeros(num_lanes, dtype=np.int64)
        self._top_p = np.ones(num_lanes)
        self._seed = np.zeros(num_lanes, dtype=np.uint64)
        self._min_tokens = np.zeros(num_lanes, dtype=np.int64)
        self._ends: list[tuple[int, ...]] = [()] * num_lanes

    def join(self, joined: JoinedSequence) -> None:
        """Remember a sequence's parameters under its lane, until another one takes it."""
        lane, params = joined.lane, joined.sampling
        self._temperature[lane] = params.temperature
        self._top_k[lane] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[lane] = params.top_p
        self._seed[lane] = joined.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._min_tokens[lane] = params.min_tokens
        ends = params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)
        self._ends[lane] = tuple(token for token in ends if token < self._vocab_size)

    def sample(self, logits: Tensor, plan: StepPlan, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens [R] and which of them are sound [R] (bool), for the plan's `rows`, whose logits are `logits` [R, V].

        A row whose logits hold NaN or +inf, or allow no token at all, is unsound and its token is 0. Works on
        `logits` in place.
        """
        logits = logits[:, : self._vocab_size]
        lanes = np.array([plan.lanes[row] for row in rows], dtype=np.int64)
        numbers = np.array([plan.output_index[row] for row in rows], dtype=np.int64)
        best, tokens = logits.max(dim=-1)
        sound = torch.isfinite(best)
        if self._restrict(logits, plan, rows, lanes, numbers):
            best, tokens = logits.max(dim=-1)
            sound &= torch.isfinite(best)
        drawn = np.flatnonzero(self._temperature[lanes] >= GREEDY_TEMPERATURE)
        if drawn.size:
            tokens = tokens.clone()
            self._draw(logits, best, tokens, lanes, numbers, drawn)
        return tokens.masked_fill(~sound, 0), sound

    def _restrict(
        self, logits: Tensor, plan: StepPlan, rows: Sequence[int], lanes: IntArray, numbers: IntArray
    ) -> bool:
        """Forbid what masks and `min_tokens` forbid; False when nothing does."""
        early = np.flatnonzero(numbers < self._min_tokens[lanes])
        for line in early.tolist():
            ends = to_device(np.array(self._ends[lanes[line]], dtype=np.int64), logits.device)
            logits[line].index_fill_(0, ends, float("-inf"))
        masked = [(line, plan.token_masks[row]) for line, row in enumerate(rows) if row in plan.token_masks]
        for line, mask in masked:
            allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=self._vocab_size, bitorder="little")
            logits[line].masked_fill_(to_device(allowed == 0, logits.device), float("-inf"))
        return bool(early.size or masked)

    def _draw(
        self, logits: Tensor, best: Tensor, tokens: Tensor, lanes: IntArray, numbers: IntArray, drawn: IntArray
    ) -> None:
        """Overwrite `tokens` of the `drawn` lines."""
        device = logits.device
        uniform = uniform_draws(self._seed[lanes], numbers)
        top_k, top_p = self._top_k[lanes], self._top_p[lanes]
        plain = (top_k[drawn] == 0) & (top_p[drawn] >= 1.0)
        few = (top_k[drawn] > 0) & (top_k[drawn] <= _NUCLEUS_WIDTH)
        rest = drawn[~plain & ~few]
        for lines, choose in ((drawn[plain], _choose), (drawn[few], _choose_of_few), (rest, _choose_filtered)):
            if not lines.size:
                continue
            index = to_device(lines, device)
            temperature = to_device(self._temperature[lanes[lines]].astype(np.float32), device)
            # The best logit becomes 0 before the division, so that a small temperature can't overflow.
            scores = (logits[index] - best[index, None]) / temperature[:, None]
            parameters = [to_device(column[lines], device) for column in (uniform, top_k, top_p)]
            tokens[index] = choose(scores.nan_to_num_(nan=0.0, posinf=0.0), *parameters)


def _choose(scores: Tensor, uniform: Tensor, _top_k: Tensor, _top_p: Tensor) -> Tensor:
    return _invert(torch.softmax(scores, dim=-1).double().cumsum(dim=-1), uniform)


def _choose_of_few(scores: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """For 0 < `top_k` <= `_NUCLEUS_WIDTH`."""
    order = scores.topk(min(_NUCLEUS_WIDTH, scores.shape[-1]), dim=-1)
    return _choose_sorted(order.values, order.indices, uniform, uniform, top_k, top_p)


def _choose_filtered(scores: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k first, then top-p of what is left; whether a row needs its full order is decided by that row alone."""
    width = min(_NUCLEUS_WIDTH, scores.shape[-1])
    total = scores.double().exp().sum(dim=-1)
    order = scores.topk(width, dim=-1)
    tokens = _choose_sorted(order.values, order.indices, total, uniform, top_k, top_p)
    reached = order.values.double().exp().sum(dim=-1) >= top_p * total
    enough = torch.where(top_k > 0, top_k <= width, reached & (top_p < 1.0))
    if scores.device.type == "cuda":
        # To ask which rows need it would mean to wait for the whole step: sort them all.
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return torch.where(enough, tokens, _choose_sorted(values, indices, total, uniform, top_k, top_p))
    wide = torch.nonzero(~enough).flatten()
    if wide.numel():
        values, indices = scores[wide].sort(dim=-1, descending=True, stable=True)
        tokens[wide] = _choose_sorted(values, indices, total[wide], uniform[wide], top_k[wide], top_p[wide])
    return tokens


def _choose_sorted(
    values: Tensor, indices: Tensor, total: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """`values`, `indices` [R, W]: the best tokens, falling; `total` [R]: sum of exp over the whole row, which only rows
    without `top_k` look at."""
    weights = values.double().exp()
    rank = torch.arange(values.shape[-1], device=values.device)
    limited = top_k > 0
    weights = weights.masked_fill(limited[:, None] & (rank >= top_k[:, None]), 0.0)
    total = torch.where(limited, weights.sum(dim=-1), total)
    before = weights.cumsum(dim=-1) - weights
    # The best token always stays: nothing lies before it.
    weights = weights.masked_fill((before >= (top_p * total)[:, None]) & (rank > 0), 0.0)
    choice = _invert(weights.cumsum(dim=-1), uniform)
    return indices.gather(-1, choice[:, None]).squeeze(-1)


def _invert(cumulated: Tensor, uniform: Tensor) -> Tensor:
    """The first place whose cumulated weight exceeds u times the whole: never one of weight 0."""
    whole = cumulated[:, -1:]
    # Rounding could let u * whole reach whole itself; the largest double below it keeps the place inside.
    goal = torch.minimum(uniform[:, None] * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulated, goal, right=True).squeeze(-1)
