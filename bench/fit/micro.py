"""Micro-benchmarks: requests chosen so that the engine's steps have known compositions, and what those steps took.

Each benchmark is one batch of requests that arrive together at an idle engine, under budgets that make its steps:

    decode w, context c     w short prompts, a few tokens each: steps of w decodes
    chunks of t             prompts of t tokens under a budget of t tokens, one token each: steps of one chunk from 0
    chunks of t, deep       one long prompt under a budget of t tokens: steps of one chunk, further and further in
    prompts of t            many short prompts under the whole budget: steps of several chunks
    w decodes and t tokens  w short prompts, then a long one: steps of w decodes and one chunk of t

Every step counts (also those while a batch builds up and runs out), with the plan that `mirror.py` finds. All
benchmarks run in turn, several rounds, so that a machine that slows down for a while slows all of them; equal steps of
one benchmark make one point, with the median of their times.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from bench.fit.engine import MeasuredEngine, Order, fixed_request
from bench.fit.mirror import measured_steps
from bench.simulate.step_cost import StepWork, work_of
from replica.config import SchedulerConfig
from replica.request import GenerationRequest

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_DEEP_WIDTHS = ((200, (1, 4, 16)), (500, (1, 8)), (1000, (1, 2)))
_CHUNKS = (16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
_TINY = (2, 8)
_DEEP_CHUNKS = ((64, 448), (128, 1024), (512, 1536))
_MIXES = ((8, 56), (16, 112), (32, 224), (48, 464))
_SHORT = 16
_REFERENCE_WIDTHS, _REFERENCE_CHUNK = (1, 8, 32), 256


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`requests`: (prompt tokens, output tokens) of each."""

    name: str
    requests: tuple[tuple[int, int], ...]
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Point:
    """Equal steps of one benchmark: what they computed, their number, their median time; `noise` is how far a step
    is from it, in the middle of the others (median absolute deviation), as a share of it."""

    benchmark: str
    work: StepWork
    num_samples: int
    seconds: float
    noise: float = 0.0


def decode(width: int, context: int, limits: SchedulerConfig, num_tokens: int = 6) -> Benchmark:
    name = f"decode {width}, context {context}"
    return Benchmark(name, ((context, num_tokens),) * width, limits.max_num_seqs, limits.max_num_batched_tokens)


def chunks(size: int, limits: SchedulerConfig, num_prompts: int = 4) -> Benchmark:
    return Benchmark(f"chunks of {size}", ((size, 1),) * num_prompts, min(limits.max_num_seqs, size - 1), size)


def micro_benchmarks(limits: SchedulerConfig, max_model_len: int) -> list[Benchmark]:
    """All that fit in these limits and this context."""
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    found = [decode(width, _SHORT, limits) for width in _WIDTHS if width <= seqs]
    found += [decode(width, context, limits) for context, widths in _DEEP_WIDTHS for width in widths if width <= seqs]
    found += [chunks(size, limits) for size in _CHUNKS if size <= tokens]
    for size, length in _DEEP_CHUNKS:
        if size <= tokens:
            found.append(Benchmark(f"chunks of {size}, deep", ((length, 1),), min(seqs, size - 1), size))
    for size in (*_TINY, *_CHUNKS):
        if 2 * size <= min(tokens, 512):
            num_prompts = min(3 * min(tokens, 512) // size, 4 * seqs)
            found.append(Benchmark(f"prompts of {size}", ((size, 1),) * num_prompts, seqs, min(tokens, 512)))
    for width, size in _MIXES:
        if width < seqs and width + size <= tokens:
            requests = ((_SHORT, 8),) * width + ((5 * size, 1),)
            found.append(Benchmark(f"{width} decodes and {size} tokens", requests, width + 1, width + size))
    return [benchmark for benchmark in found if max(map(sum, benchmark.requests)) <= max_model_len]


def reference_steps(limits: SchedulerConfig) -> list[Benchmark]:
    """A few seconds of micro-benchmarks that say how fast the machine is now: narrow, wide, prefill. Those of them that
    fit in the limits; a fit with the same limits has measured the same."""
    widths = [width for width in _REFERENCE_WIDTHS if width <= limits.max_num_seqs]
    sizes = [_REFERENCE_CHUNK] if limits.max_num_batched_tokens >= _REFERENCE_CHUNK else []
    return [*(decode(width, _SHORT, limits, 10) for width in widths), *(chunks(size, limits, 5) for size in sizes)]


REFERENCE_NAMES = frozenset(benchmark.name for benchmark in reference_steps(SchedulerConfig(max_num_seqs=256)))
"""What `reference_steps` are called where the limits allow all of them: every fit measures these too."""


def _point(name: str, work: StepWork, times: list[float]) -> Point:
    middle = median(times)
    return Point(name, work, len(times), middle, median(abs(seconds - middle) for seconds in times) / middle)


class MicroBenchmarks:
    """Runs benchmarks on an engine that is otherwise idle. Prompts are random and never repeat, so that the prefix
    cache finds nothing; `seed` is theirs."""

    def __init__(self, engine: MeasuredEngine, seed: int = 0) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._num_requests = 0

    def measure(
        self, benchmarks: Iterable[Benchmark], rounds: Iterable[int], progress: Callable[[int, int, str], None]
    ) -> list[Point]:
        """Points in order of benchmarks, which all run in each of `rounds`; `progress` hears the round, a benchmark's
        number and its name. Raises `ValueError` when the engine did something else than its scheduler plans."""
        taken: defaultdict[tuple[str, StepWork], list[float]] = defaultdict(list)
        listed = list(benchmarks)
        for number in rounds:
            for place, benchmark in enumerate(listed):
                progress(number, place, benchmark.name)
                for work, seconds in self._run(benchmark):
                    taken[benchmark.name, work].append(seconds)
        order = {benchmark.name: place for place, benchmark in enumerate(listed)}
        points = [_point(name, work, times) for (name, work), times in taken.items()]
        return sorted(points, key=lambda point: (order[point.benchmark], point.work))

    def _run(self, benchmark: Benchmark) -> Iterator[tuple[StepWork, float]]:
        requests = tuple(self._request(*lengths) for lengths in benchmark.requests)
        budgets = {"max_num_seqs": benchmark.max_num_seqs, "max_num_batched_tokens": benchmark.max_num_batched_tokens}
        orders = [Order(0.0, requests, tuple(budgets.items()))]
        played = self._engine.play(orders, lambda _: None)
        for step in measured_steps(self._engine, orders, played):
            if step.seconds is not None:
                yield work_of(step.plan, self._engine.shape.block_size), step.seconds

    def _request(self, num_prompt_tokens: int, num_output_tokens: int) -> GenerationRequest:
        self._num_requests += 1
        vocab_size = self._engine.shape.vocab_size
        prompt = tuple(self._random.randrange(vocab_size) for _ in range(num_prompt_tokens))
        return fixed_request(f"micro-{self._num_requests}", prompt, num_output_tokens)
