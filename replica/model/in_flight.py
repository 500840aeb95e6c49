"""A step given to the device: its tokens on their way to the host, and its result once they are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from replica.errors import NonFiniteLogits
from replica.model.api import OutOfDeviceMemory
from replica.model.host_memory import is_out_of_memory
from replica.model.transfers import HostCopy
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult

_UNSOUND = -1


class InFlight:
    """A step whose tokens may still be on the device."""

    def __init__(self, plan: StepPlan, rows: list[int], tokens: Tensor, sound: Tensor) -> None:
        self._plan = plan
        self._rows = rows
        # Queued now, so that waiting for it is waiting for this step and not for later ones.
        self._copy = HostCopy(tokens.masked_fill(~sound, _UNSOUND))

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
        return StepResult(plan.step, token_ids, failed)


@contextmanager
def device_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfDeviceMemory(str(error).splitlines()[0] if str(error) else "out of memory") from error
