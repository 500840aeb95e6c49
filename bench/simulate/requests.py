"""What a run whose lengths are known asks for: answers of an exact length, and a queue that takes them all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from replica.request import SamplingParams

NO_LIMIT: Final = 2**31
"""More than any run has, of requests and tokens; in seconds longer than any run lasts."""

QUEUE_WITHOUT_BOUNDS: Final[dict[str, Any]] = {
    "max_num_queued_seqs": NO_LIMIT,
    "max_num_queued_tokens": NO_LIMIT * NO_LIMIT,
    "queue_timeout_s": float(NO_LIMIT),
}
"""Settings of the scheduler by which nobody is refused and nobody expires."""


@lru_cache(maxsize=4096)
def exactly(num_tokens: int) -> SamplingParams:
    """Greedy sampling that makes exactly `num_tokens`."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True)
