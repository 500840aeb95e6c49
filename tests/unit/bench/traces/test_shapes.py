"""Generated traces against the numbers that were published; each tolerance is what the sampling or the model allows."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import numpy as np
import pytest

from bench.traces import shapes
from bench.traces.generate import SHAPES, generate
from bench.traces.lengths import zipf_probabilities
from bench.traces.trace import QUANTILES, Trace, floats, ints

INNER = slice(1, -1)
"""Without minimum and maximum, which a sample approaches but needn't reach."""


@lru_cache(maxsize=8)
def large(shape: str) -> Trace:
    return generate(shape, 60_000, seed=7)


@pytest.mark.parametrize(
    ("shape", "prompts", "outputs"),
    [
        ("W1", shapes.AZURE_CODE_IN, shapes.AZURE_CODE_OUT),
        ("W2", shapes.AZURE_CHAT_IN, shapes.AZURE_CHAT_OUT),
        ("W4", shapes.MOONCAKE_CHAT_IN, shapes.MOONCAKE_CHAT_OUT),
        ("W5", shapes.MOONCAKE_SYNTHETIC_IN, shapes.MOONCAKE_SYNTHETIC_OUT),
    ],
)
def test_lengths_have_the_published_quantiles(shape: str, prompts: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    """Within 6 % and one token; at 1 % of 60,000 the sampling error of W2's steep lower end is the largest."""
    trace = large(shape)
    for column, grid in ((trace.prompt_tokens, prompts), (trace.output_tokens, outputs)):
        drawn = np.percentile(ints(column), QUANTILES)
        assert drawn[INNER] == pytest.approx(np.array(grid[INNER]), rel=0.06, abs=1.0)
        assert ints(column).min() >= grid[0] and ints(column).max() <= grid[-1]


@pytest.mark.parametrize(
    ("shape", "mean_in", "mean_out", "correlation", "within"),
    [
        ("W1", 2048, 27.9, 0.00, 0.03),
        ("W2", 1155, 211, 0.09, 0.05),
        ("W4", 12_035, 343, 0.00, 0.05),
        ("W5", 15_325, 149, -0.49, 0.03),
        ("W7", 101.7, 101.7, 0.00, 0.03),
        ("W8-herding", 1000, 1000, None, 0.0),
    ],
)
def test_means_and_correlation_of_logarithms_are_the_published_ones(
    shape: str, mean_in: float, mean_out: float, correlation: float | None, within: float
) -> None:
    summary = large(shape).summary()
    assert summary["prompt_tokens"]["mean"] == pytest.approx(mean_in, rel=max(within / 2, 0.04))
    assert summary["output_tokens"]["mean"] == pytest.approx(mean_out, rel=within)
    if correlation is not None:
        assert summary["log_correlation"] == pytest.approx(correlation, abs=0.05)


def test_outputs_of_azure_conversations_depend_on_the_prompt_as_published() -> None:
    trace = large("W2")
    prompts, outputs = ints(trace.prompt_tokens), ints(trace.output_tokens)
    low = 0
    for (high, p10, p50, p90), share in zip(shapes.AZURE_CHAT_CLASSES, (0.27, 0.15, 0.36, 0.13, 0.09), strict=True):
        inside = (prompts >= low) & (prompts < high)
        assert inside.mean() == pytest.approx(share, abs=0.01)
        assert np.percentile(outputs[inside], 50) == pytest.approx(p50, rel=0.08)
        assert np.percentile(outputs[inside], (10, 90)) == pytest.approx(np.array([p10, p90]), rel=0.2)
        low = high


def dispersion(trace: Trace, window_s: float) -> float:
    per_window = np.bincount((floats(trace.arrival_s) / window_s).astype(int))
    return float(per_window.var() / per_window.mean())


def test_azure_conversations_arrive_nearly_at_random_with_a_slow_drift() -> None:
    trace = large("W2")
    assert trace.summary()["requests_per_s"] == pytest.approx(5.53, rel=1e-3)
    assert trace.summary()["gap_cv"] == pytest.approx(1.09, abs=0.05)
    assert dispersion(trace, 1) == pytest.approx(1.4, rel=0.15)
    assert dispersion(trace, 10) == pytest.approx(4.0, rel=0.4)
    assert dispersion(trace, 60) == pytest.approx(20.6, rel=0.4)


def test_azure_code_arrives_in_bursts_with_minutes_of_silence() -> None:
    """One hour is one sample of a bursty process: its own numbers would differ by a third in the next hour."""
    trace = large("W1")
    gaps = np.diff(floats(trace.arrival_s))
    per_second = np.bincount(floats(trace.arrival_s).astype(int))
    busy = per_second >= 10
    assert gaps.std() / gaps.mean() == pytest.approx(13.2, rel=0.3)
    assert np.percentile(gaps, (50, 90)) == pytest.approx(np.array([0.064, 0.27]), rel=0.3)
    assert gaps.max() > 120
    assert (per_second == 0).mean() == pytest.approx(0.73, abs=0.05)
    assert busy.mean() == pytest.approx(0.092, abs=0.025)
    assert per_second[busy].mean() == pytest.approx(17.3, rel=0.15)
    assert per_second[busy].sum() / len(trace) == pytest.approx(0.62, abs=0.1)
    assert dispersion(trace, 1) == pytest.approx(13, rel=0.3)
    assert dispersion(trace, 10) == pytest.approx(71, rel=0.4)
    assert dispersion(trace, 60) == pytest.approx(161, rel=0.5)


@pytest.mark.parametrize(("shape", "cv"), [("W4", 1.0), ("W5", 1.01), ("W6", 1.0), ("W7", 1.41)])
def test_gaps_of_the_other_shapes_vary_as_published(shape: str, cv: float) -> None:
    assert large(shape).summary()["gap_cv"] == pytest.approx(cv, abs=0.03)


def test_burstgpt_lengths_are_the_truncated_zipf() -> None:
    probabilities = zipf_probabilities(1.1, 1024)
    assert len(probabilities) == 1023 and probabilities.sum() == pytest.approx(1.0)
    assert float(probabilities @ np.arange(1, 1024)) == pytest.approx(101.7, abs=0.05)
    drawn = np.percentile(ints(large("W7").output_tokens), (25, 50, 75, 90, 99))
    assert drawn == pytest.approx(np.array([2, 12, 87, 355, 916]), rel=0.06, abs=1.0)


def test_sharegpt_obeys_the_filter_of_the_benchmark() -> None:
    trace = large("W6")
    prompts, outputs = ints(trace.prompt_tokens), ints(trace.output_tokens)
    assert prompts.min() >= 4 and outputs.min() >= 4
    assert prompts.max() <= 1024 and (prompts + outputs).max() <= 2048


def hit_share_of_lru(trace: Trace, capacity_tokens: float) -> float:
    """Share of all blocks, the half-filled last ones included, that a cache of this size has seen."""
    capacity = int(capacity_tokens / trace.block_tokens)
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_blocks = own = 0
    for shared, length in zip(trace.block_ids, trace.prompt_tokens, strict=True):
        blocks = [*shared]
        for _ in range(-(-length // trace.block_tokens) - len(shared)):
            own -= 1
            blocks.append(own)
        num_blocks += len(blocks)
        for block in blocks:
            if block in cache:
                num_hits += 1
                cache.move_to_end(block)
            else:
                cache[block] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
    return num_hits / num_blocks


@pytest.mark.parametrize(
    ("shape", "num", "infinite", "by_capacity"),
    [
        ("W4", 12_031, 0.366, {0.5e6: 0.044, 2.6e6: 0.110, 10.2e6: 0.287, 25.6e6: 0.355}),
        ("W5", 3_993, 0.640, {0.5e6: 0.082, 2.6e6: 0.279, 10.2e6: 0.571, 25.6e6: 0.640}),
    ],
)
def test_mooncake_prefixes_hit_as_published_in_caches_of_every_size(
    shape: str, num: int, infinite: float, by_capacity: dict[float, float]
) -> None:
    trace = generate(shape, num, seed=7)
    assert hit_share_of_lru(trace, 1e12) == pytest.approx(infinite, abs=0.03)
    for capacity, share in by_capacity.items():
        assert hit_share_of_lru(trace, capacity) == pytest.approx(share, abs=0.06), capacity


def hit_shares(trace: Trace) -> list[float]:
    seen: set[int] = set()
    shares = []
    for shared, length in zip(trace.block_ids, trace.prompt_tokens, strict=True):
        shares.append(sum(block in seen for block in shared) / -(-length // trace.block_tokens))
        seen.update(shared)
    return shares


def test_mooncake_conversations_share_the_first_block_and_differ_in_how_much_more() -> None:
    trace = generate("W4", 12_031, seed=7)
    assert {shared[0] for shared in trace.block_ids} == {0}
    quartiles = np.percentile(hit_shares(trace), (25, 50, 75))
    assert quartiles == pytest.approx(np.array([0.07, 0.33, 0.67]), abs=0.1)


def test_mooncake_synthetic_requests_hit_nothing_or_nearly_all() -> None:
    shares = np.array(hit_shares(generate("W5", 3_993, seed=7)))
    assert (shares == 0).mean() == pytest.approx(0.55, abs=0.05)
    assert np.percentile(shares, 75) == pytest.approx(0.97, abs=0.07)


@pytest.mark.parametrize(("shape", "ideal"), [("W8-prefix-repetition", 0.495), ("W8-shared-prefix", 0.882)])
def test_shared_prefixes_of_benchmark_tools_hit_as_their_arithmetic_says(shape: str, ideal: float) -> None:
    assert generate(shape, 1000 if "repetition" in shape else 1024, seed=7).shared_block_share() == pytest.approx(
        ideal, abs=0.001
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_can_be_made_small(shape: str) -> None:
    trace = generate(shape, 50, seed=3)
    assert len(trace) == 50 and trace.name == shape
    assert list(trace.arrival_s) == sorted(trace.arrival_s) and trace.arrival_s[0] == 0.0
    assert min(trace.prompt_tokens) >= 1 and min(trace.output_tokens) >= 1
