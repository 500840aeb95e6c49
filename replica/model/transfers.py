"""Copies between host and device that wait for nothing but themselves.

A copy through pinned memory is queued like a kernel; one through ordinary memory makes the host wait for all that was
queued before it. torch's allocator of pinned memory gives none out again before the copy that used it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`values` on the device; on the CPU the same memory."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host. `result` waits for this copy alone: steps queued after it go on."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> npt.NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        found: npt.NDArray[Any] = np.asarray(self._copy.numpy())
        return found
