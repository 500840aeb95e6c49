"""What this machine can do at most, measured with torch in a process of its own.

    python -m bench.engine_speed.machine_driver NUM_THREADS     (from the root of the project)

In: {"measure": true}. Out: {"bandwidth": bytes a second, "rate": floating-point operations a second}. Bandwidth: a
matrix far larger than the caches times one vector, or its sum, whichever streams faster. Rate: square float32 matrix
products. Of a few tries the best: whatever else the machine does only makes them slower.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from bench.peers.driver_loop import serve

_STREAM_ROWS, _STREAM_COLUMNS = 131_072, 1024
"""512 MiB of float32: no cache holds a part of it worth mentioning."""
_PRODUCT_SIZES = (1536, 2048)
_TRIES = 9


def _best_s(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_TRIES):
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return min(times)


def measure(torch: Any) -> dict[str, float]:
    with torch.inference_mode():
        return {"bandwidth": _bandwidth(torch), "rate": max(_rate(torch, size) for size in _PRODUCT_SIZES)}


def _bandwidth(torch: Any) -> float:
    weights, vector = torch.ones(_STREAM_ROWS, _STREAM_COLUMNS), torch.ones(_STREAM_COLUMNS)
    seconds = min(_best_s(lambda: torch.mv(weights, vector)), _best_s(weights.sum))
    return float(weights.numel() * weights.element_size() / seconds)


def _rate(torch: Any, size: int) -> float:
    left, right, out = (torch.ones(size, size) for _ in range(3))
    return 2.0 * size**3 / _best_s(lambda: torch.mm(left, right, out=out))


def main(arguments: list[str]) -> None:
    def load() -> tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        import torch

        torch.set_num_threads(int(arguments[0]))
        return torch.__version__, lambda _order: measure(torch)

    serve(load)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
