"""A list of requests as columns: when each arrives, how many tokens come in and go out, which blocks it shares.

Everything is drawn once, by `generate.py`; a trace can then be replayed exactly, made faster, slower or smaller.
Same numbers in every process: nothing depends on `hash` or on a global random state.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replica.errors import SettingError

QUANTILES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
"""Levels, in percent, at which lengths are given and reported."""

POOL_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Trace:
    """`arrival_s`: seconds, sorted, from 0. `prompt_tokens`, `output_tokens`: at least 1 each.

    `block_ids[i]` names the leading blocks of request i's prompt, `block_tokens` tokens each, for as far as any other
    request has the same: equal ids at equal places are equal tokens. The rest of a prompt is its own. Empty: nothing
    is shared.
    """

    name: str
    seed: int
    arrival_s: array[float]
    prompt_tokens: array[int]
    output_tokens: array[int]
    block_ids: tuple[array[int], ...] = ()
    block_tokens: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    def at_rate(self, requests_per_s: float) -> Trace:
        """The same requests with time stretched to this mean rate; bursts keep their shape."""
        if not requests_per_s > 0:
            raise SettingError("rate", requests_per_s, "more than 0 requests per second")
        span_s = self.arrival_s[-1] if self.arrival_s else 0.0
        if span_s <= 0.0:
            raise SettingError("rate", requests_per_s, f"none for {self.name}, whose requests all come at once")
        stretch = len(self) / requests_per_s / span_s
        return replace(self, arrival_s=seconds(floats(self.arrival_s) * stretch))

    def scaled(self, divisor: int) -> Trace:
        """All lengths divided, rounded down, at least 1; shared blocks stay in proportion. Arrivals stay."""
        if divisor < 1:
            raise SettingError("divisor", divisor, "at least 1")
        return replace(
            self,
            prompt_tokens=counts(np.maximum(1, ints(self.prompt_tokens) // divisor)),
            output_tokens=counts(np.maximum(1, ints(self.output_tokens) // divisor)),
            block_tokens=max(1, self.block_tokens // divisor) if self.block_tokens else 0,
        )

    def all_present(self) -> Trace:
        """The same requests, all there at time 0."""
        return replace(self, arrival_s=seconds(np.zeros(len(self))))

    def prompt_ids(self, i: int, vocab_size: int) -> tuple[int, ...]:
        """Tokens of request i, each below `vocab_size` (at least 2). Two prompts agree in a whole block only where
        `block_ids` say so, as long as a block holds the few tokens that spell its number."""
        pool = _token_pool(self.seed, vocab_size)
        length = self.prompt_tokens[i]
        shared = self.block_ids[i] if self.block_ids else ()
        if not shared:
            return _stretch(pool, 2 * i, length, vocab_size)
        tokens: list[int] = []
        for block in shared:
            tokens += _stretch(pool, 2 * block + 1, self.block_tokens, vocab_size)
        tokens += _stretch(pool, 2 * i, length - len(tokens), vocab_size)
        return tuple(tokens)

    def summary(self) -> dict[str, Any]:
        """What was really drawn, to stand beside any result: sizes, rate, quantiles, sharing."""
        prompts, outputs = ints(self.prompt_tokens), ints(self.output_tokens)
        gaps = np.diff(floats(self.arrival_s))
        span_s = float(self.arrival_s[-1]) if len(self) else 0.0
        both = len(self) > 1 and prompts.std() > 0 and outputs.std() > 0
        return {
            "name": self.name,
            "seed": self.seed,
            "num_requests": len(self),
            "requests_per_s": round(len(self) / span_s, 4) if span_s else None,
            "gap_cv": round(float(gaps.std() / gaps.mean()), 3) if span_s else None,
            "prompt_tokens": _lengths(prompts),
            "output_tokens": _lengths(outputs),
            "log_correlation": round(float(np.corrcoef(np.log(prompts), np.log(outputs))[0, 1]), 3) if both else None,
            "shared_block_share": round(self.shared_block_share(), 4) if self.block_ids else 0.0,
        }

    def shared_block_share(self) -> float:
        """Of all full prompt blocks, how many an unbounded cache would have seen before."""
        seen: set[int] = set()
        num_hits = 0
        for shared in self.block_ids:
            for block in shared:
                num_hits += block in seen
                seen.add(block)
        num_blocks = int((ints(self.prompt_tokens) // self.block_tokens).sum()) if self.block_tokens else 0
        return num_hits / num_blocks if num_blocks else 0.0


def seconds(values: NDArray[np.float64]) -> array[float]:
    column: array[float] = array("d")
    column.frombytes(values.astype(np.float64).tobytes())
    return column


def counts(values: NDArray[Any]) -> array[int]:
    column: array[int] = array("i")
    column.frombytes(values.astype(np.intc).tobytes())
    return column


def floats(column: array[float]) -> NDArray[np.float64]:
    return np.frombuffer(column, dtype=np.float64) if column else np.zeros(0)


def ints(column: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.intc).astype(np.int64) if column else np.zeros(0, np.int64)


def _lengths(values: NDArray[np.int64]) -> dict[str, Any]:
    if not len(values):
        return {"mean": None, "quantiles": []}
    return {"mean": round(float(values.mean()), 2), "quantiles": [int(q) for q in np.percentile(values, QUANTILES)]}


@lru_cache(maxsize=4)
def _token_pool(seed: int, vocab_size: int) -> tuple[int, ...]:
    """Twice the same random tokens, so that a slice may begin anywhere in the first half."""
    drawn = np.random.default_rng((seed, vocab_size)).random(POOL_TOKENS)
    return 2 * tuple((drawn * vocab_size).astype(np.int64).tolist())


def _stretch(pool: tuple[int, ...], number: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` tokens that begin by spelling `number`, so that no two numbers begin alike; the rest from the pool."""
    head = [number % vocab_size]
    rest = number // vocab_size
    while rest:
        head.append(rest % vocab_size)
        rest //= vocab_size
    head = head[:length]
    offset = number * 40503 % POOL_TOKENS
    num_more = length - len(head)
    if num_more <= POOL_TOKENS:
        return (*head, *pool[offset : offset + num_more])
    half = pool[offset : offset + POOL_TOKENS]
    return (*head, *(half * (num_more // POOL_TOKENS + 1))[:num_more])
