"""A step given to the device: its tokens on their way to the host, and its result once they are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from replica.errors import NonFiniteLogits
from replica.model.api import OutOfDeviceMemory
from replica.model.sampler import next_token_logprobs
from replica.model.transfers import HostCopy
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult

_NUM_TOP_LOGPROBS = 20
_UNSOUND = -1


class InFlight:
    """A step whose tokens may still be on the device."""

    def __init__(self, plan: StepPlan, rows: list[int], tokens: Tensor, sound: Tensor, logits: Tensor) -> None:
        self._plan = plan
        self._rows = rows
        # Queued now, so that waiting for it is waiting for this step and not for later ones.
        self._copy = HostCopy(tokens.masked_fill(~sound, _UNSOUND))
        # Kept only where log-probabilities are due: logits of a step are large.
        self._logits = logits if any(count > 1 for count in plan.num_logits) else None

    def result(self) -> StepResult:
        """Waits for the device."""
        plan = self._plan
        with device_errors():
            tokens = self._copy.result().tolist()
        token_ids = [PENDING_TOKEN] * len(plan)
        failed: dict[int, str] = {}
        for row, token in zip(self._rows, tokens, strict=True):
            token_ids[row] = max(token, 0)
            if token == _UNSOUND:
                failed[row] = NonFiniteLogits.code
        return StepResult(plan.step, token_ids, failed, self._logprobs(token_ids))

    def _logprobs(self, token_ids: list[int]) -> dict[int, list[tuple[float, list[tuple[int, float]]]]]:
        """For rows that asked for more than their last position."""
        if self._logits is None:
            return {}
        plan = self._plan
        ends, logits_ends = np.cumsum(plan.num_tokens), np.cumsum(plan.num_logits)
        found = {}
        for row, count in enumerate(plan.num_logits):
            if count > 1:
                known: list[int | None] = list(plan.token_ids[ends[row] - count + 1 : ends[row]])
                known.append(token_ids[row] if plan.samples[row] else None)
                logits = self._logits[logits_ends[row] - count : logits_ends[row]]
                found[row] = next_token_logprobs(logits, known, _NUM_TOP_LOGPROBS)
        return found


@contextmanager
def device_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfDeviceMemory(str(error).splitlines()[0] if str(error) else "out of memory") from error


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's CPU allocator raises an error of no kind of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
