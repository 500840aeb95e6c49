"""What a device can do at most, measured: the two limits that no step can be faster than."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from replica.model.weights import choose_device, choose_dtype

_TRIES = 5
# Far larger than any cache; on the CPU small enough to be done in a second.
_STREAM_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = {"cuda": 10, "cpu": 1}


def device_limits(device: str = "auto", dtype: str = "auto") -> tuple[float, float]:
    """(bytes a second, floating-point operations a second) of `device` in `dtype`: the best of a few tries.

    Bytes: a sum over memory, or a copy within it (read and written), whichever moves more. Operations: a square matrix
    product of random numbers (zeros are faster, and no model's).
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    with torch.inference_mode():
        return _bandwidth(where, kind), _rate(where, kind)


def device_name(device: str = "auto") -> str:
    where = choose_device(device)
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def _bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    num_bytes = _STREAM_BYTES[device.type]
    source = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    read = num_bytes / _best_s(lambda: source.sum(dtype=torch.float32), device)
    half = len(source) // 2
    copied = num_bytes / _best_s(lambda: source[:half].copy_(source[half : 2 * half]), device)
    return max(read, copied)


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return 2.0 * size**3 / _best_s(lambda: torch.mm(left, right, out=out), device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    repeats = _REPEATS[device.type]
    times = []
    for _ in range(_TRIES + 1):
        _wait(device)
        began = perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        times.append((perf_counter() - began) / repeats)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
