"""What became of every request, and the numbers that are reported of a whole run.

Latencies are measured where the request came in: time to first token, time between tokens of one request, and from
arrival to end. Goodput counts requests that made all their tokens within both objectives (`Objectives`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.simulate.replica import Ended
from bench.simulate.step_totals import NS, StepTotals
from replica.request import FinishReason

LEVELS = (50, 90, 95, 99)
_NEVER = float("nan")
_OPEN, _FINISHED, _REJECTED, _TIMEOUT = range(4)
_CODES = {FinishReason.REJECTED: _REJECTED, FinishReason.TIMEOUT: _TIMEOUT}


class Objectives(NamedTuple):
    """A request is good when its first token came within `ttft_s` of its arrival and its mean gap between tokens is at
    most `itl_s`. Seconds."""

    ttft_s: float
    itl_s: float


class RequestColumns:
    """Row i is request i of the trace. Times in virtual seconds, NaN for what didn't happen; `replica` is -1 before a
    decision."""

    def __init__(self, arrival_s: array[float]) -> None:
        num = len(arrival_s)
        self.arrival_s = arrival_s
        self.first_token_s = array("d", [_NEVER]) * num
        self.end_s = array("d", [_NEVER]) * num
        self.num_output_tokens = array("i", [0]) * num
        self.num_preemptions = array("i", [0]) * num
        self.replica = array("i", [-1]) * num
        self.num_ended = 0
        self._fate = bytearray(num)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def end(self, request: Ended, back_s: float = 0.0) -> None:
        """The request ended; its news took `back_s` to arrive. Once each."""
        number = request.number
        if self._fate[number] != _OPEN:
            raise RuntimeError(f"request {number} ended twice")
        self._fate[number] = _CODES.get(request.reason, _FINISHED)
        self.num_ended += 1
        self.end_s[number] = request.end_s + back_s
        self.num_output_tokens[number] = request.num_output_tokens
        self.num_preemptions[number] = request.num_preemptions
        if request.first_token_s is not None:
            self.first_token_s[number] = request.first_token_s + back_s

    def finished(self) -> NDArray[np.bool_]:
        """Which requests made all their tokens."""
        finished: NDArray[np.bool_] = self._fates() == _FINISHED
        return finished

    def num_rejected(self) -> int:
        return int((self._fates() == _REJECTED).sum())

    def num_timed_out(self) -> int:
        return int((self._fates() == _TIMEOUT).sum())

    def _fates(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._fate, dtype=np.uint8) if self._fate else np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_blocks` are the KV blocks of all `num_replicas` together; `workers_peak_rss_bytes` the most memory that each
    worker process had, added up."""

    requests: RequestColumns
    steps: StepTotals
    num_replicas: int
    num_blocks: int
    workers_peak_rss_bytes: int = 0

    def summary(self, objectives: Objectives) -> dict[str, Any]:
        """Plain JSON. Seconds, tokens, requests; None where there is nothing to measure."""
        requests, steps = self.requests, self.steps
        finished = requests.finished()
        arrival, first, end = (_floats(c) for c in (requests.arrival_s, requests.first_token_s, requests.end_s))
        ttft, e2e = (first - arrival)[finished], (end - arrival)[finished]
        num_gaps = np.frombuffer(requests.num_output_tokens, np.intc)[finished] - 1 if len(requests) else np.zeros(0)
        mean_gap = (end - first)[finished] / np.maximum(num_gaps, 1)
        good = int(((ttft <= objectives.ttft_s) & (mean_gap <= objectives.itl_s)).sum())
        span_s = float(np.nanmax(end) - np.min(arrival)) if requests.num_ended else 0.0
        last_arrival_s = float(arrival.max()) if len(requests) else 0.0
        return {
            "num_requests": len(requests),
            "num_finished": int(finished.sum()),
            "num_refused": requests.num_rejected(),
            "num_timed_out": requests.num_timed_out(),
            "duration_s": span_s,
            "ttft_s": _distribution(ttft),
            "itl_s": dict(
                zip(_names(), [steps.itl.mean(), *steps.itl.percentiles(LEVELS)], strict=True),
            ),
            "mean_itl_s": _distribution(mean_gap[num_gaps > 0]),
            "e2e_s": _distribution(e2e),
            "goodput_requests_per_s": good / span_s if span_s else None,
            "good_share": good / len(requests) if len(requests) else None,
            "throughput_requests_per_s": int(finished.sum()) / span_s if span_s else None,
            "output_tokens_per_s": steps.num_output_tokens / span_s if span_s else None,
            **self._of_steps(span_s, last_arrival_s),
            **self._of_preemptions(),
            "routing": self._of_routing(),
        }

    def _of_steps(self, span_s: float, last_arrival_s: float) -> dict[str, Any]:
        steps = self.steps
        num_steps = steps.num_steps
        mean_tokens = steps.num_tokens / num_steps if num_steps else 0.0
        variance = steps.sum_squared_tokens / num_steps - mean_tokens**2 if num_steps else 0.0
        bins = steps.bins()
        held = sum(part.held for part in bins) * (bins[0].width_s if bins else 0.0)
        all_blocks = self.num_blocks * span_s
        return {
            "num_steps": num_steps,
            "tokens_per_step": mean_tokens if num_steps else None,
            "tokens_per_step_cv": max(0.0, variance) ** 0.5 / mean_tokens if num_steps else None,
            "sequences_per_step": steps.num_rows / num_steps if num_steps else None,
            "mean_step_s": steps.busy_ns / NS / num_steps if num_steps else None,
            "busy_share": steps.busy_ns / NS / span_s / self.num_replicas if span_s else None,
            "max_waiting": steps.max_waiting,
            "waiting_growth_per_s": steps.waiting_growth(last_arrival_s),
            "kv_usage_mean": held / all_blocks if all_blocks else None,
            "kv_usage_max": steps.max_held / (self.num_blocks / self.num_replicas) if self.num_blocks else None,
        }

    def _of_preemptions(self) -> dict[str, Any]:
        steps, counts = self.steps, self.requests.num_preemptions
        useful = steps.num_tokens - steps.num_recomputed_tokens
        return {
            "num_preemptions": sum(counts),
            "max_preemptions": max(counts, default=0),
            "computed_tokens": steps.num_tokens,
            "recomputed_tokens": steps.num_recomputed_tokens,
            "computed_per_useful": steps.num_tokens / useful if useful else None,
            "output_tokens": steps.num_output_tokens,
        }

    def _of_routing(self) -> dict[str, Any]:
        """How evenly requests and output tokens were spread: the busiest replica over the mean."""
        chosen = np.frombuffer(self.requests.replica, np.intc) if len(self.requests) else np.zeros(0, np.intc)
        sent = chosen >= 0
        tokens = np.frombuffer(self.requests.num_output_tokens, np.intc) if len(chosen) else chosen
        return {
            "requests_max_over_mean": _max_over_mean(np.bincount(chosen[sent], minlength=self.num_replicas)),
            "output_tokens_max_over_mean": _max_over_mean(
                np.bincount(chosen[sent], weights=tokens[sent], minlength=self.num_replicas)
            ),
        }


def columns_of(arrival_s: array[float], ended: Iterable[Ended]) -> RequestColumns:
    """Columns of a run on one replica."""
    columns = RequestColumns(arrival_s)
    for request in ended:
        columns.end(request)
    return columns


def _names() -> list[str]:
    return ["mean", *(f"p{level}" for level in LEVELS)]


def _distribution(values: NDArray[np.float64]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(_names())
    return {
        "mean": float(values.mean()),
        **{f"p{level}": float(value) for level, value in zip(LEVELS, np.percentile(values, LEVELS), strict=True)},
    }


def _max_over_mean(values: NDArray[Any]) -> float | None:
    return float(values.max() / values.mean()) if len(values) and values.mean() > 0 else None


def _floats(column: array[float]) -> NDArray[np.float64]:
    return np.frombuffer(column, dtype=np.float64) if column else np.zeros(0)
