"""A trace's columns: replayed exactly, stretched, scaled, turned into tokens."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from bench.traces.generate import fixed_lengths, generate, spread_lengths
from bench.traces.trace import Trace, counts, floats, ints, seconds
from replica.errors import SettingError

FINGERPRINT = """
from zlib import crc32
from bench.traces.generate import generate
trace = generate("W4", 300, 5)
columns = [trace.arrival_s, trace.prompt_tokens, trace.output_tokens, *trace.block_ids]
print(crc32(b"".join(c.tobytes() for c in columns) + repr(trace.prompt_ids(7, 1000)).encode()))
"""


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    prints = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1 and prints != {""}
    assert generate("W2", 100, 1) == generate("W2", 100, 1) != generate("W2", 100, 2)


def test_a_rate_stretches_time_and_keeps_the_shape() -> None:
    trace = generate("W1", 1000, 1)
    fast = trace.at_rate(50.0)
    assert fast.arrival_s[-1] == pytest.approx(1000 / 50.0)
    stretch = floats(fast.arrival_s)[1:] / floats(trace.arrival_s)[1:]
    assert stretch == pytest.approx(np.full(999, stretch[0]))
    assert fast.prompt_tokens == trace.prompt_tokens
    assert floats(generate("W1", 1000, 1, rate=50.0).arrival_s) == pytest.approx(floats(fast.arrival_s))


def test_all_present_is_time_zero_for_all_and_has_no_rate() -> None:
    trace = generate("W2", 10, 1).all_present()
    assert list(trace.arrival_s) == [0.0] * 10
    with pytest.raises(SettingError, match="come at once"):
        trace.at_rate(1.0)


def test_scaling_divides_lengths_and_blocks_alike() -> None:
    trace = Trace("t", 0, seconds(np.zeros(2)), counts(np.array([100, 7])), counts(np.array([33, 1])), (), 16)
    small = trace.scaled(8)
    assert (list(small.prompt_tokens), list(small.output_tokens), small.block_tokens) == ([12, 1], [4, 1], 2)


def test_scaled_prefixes_still_fit_into_their_prompts_and_agree() -> None:
    trace = generate("W4", 200, 1).scaled(32)
    assert trace.block_tokens == 16
    first = trace.prompt_ids(0, 500)
    for i, shared in enumerate(trace.block_ids):
        prompt = trace.prompt_ids(i, 500)
        assert len(prompt) == trace.prompt_tokens[i] >= len(shared) * 16
        assert prompt[:16] == first[:16]
        assert min(prompt) >= 0 and max(prompt) < 500


def test_prompts_agree_in_a_block_exactly_where_the_block_ids_do() -> None:
    trace = generate("W5", 400, 1).scaled(32)
    size = trace.block_tokens
    owners: dict[tuple[int, ...], set[object]] = {}
    for i, shared in enumerate(trace.block_ids):
        prompt = trace.prompt_ids(i, 3)
        for b in range(len(prompt) // size):
            name = shared[b] if b < len(shared) else ("own", i, b)
            owners.setdefault(prompt[: (b + 1) * size], set()).add(name)
    assert all(len(names) == 1 for names in owners.values())
    assert sum(len(shared) for shared in trace.block_ids) > len(owners) / 10


def test_a_prompt_longer_than_the_pool_of_tokens_is_whole() -> None:
    trace = Trace("t", 0, seconds(np.zeros(1)), counts(np.array([300_000])), counts(np.array([1])))
    assert len(trace.prompt_ids(0, 100)) == 300_000


@pytest.mark.parametrize(
    ("spread", "long_share", "outputs"),
    [(0.0, 0.5, {100}), (0.5, 0.5, {50, 150}), (0.9, 0.1, {10, 910}), (1.0, 0.5, {1, 199})],
)
def test_a_spread_keeps_the_mean(spread: float, long_share: float, outputs: set[int]) -> None:
    trace = spread_lengths(20_000, 1, prompt_tokens=7, mean_output_tokens=100, spread=spread, long_share=long_share)
    assert set(trace.output_tokens) == outputs and set(trace.prompt_tokens) == {7}
    assert ints(trace.output_tokens).mean() == pytest.approx(100, rel=0.05)
    assert set(trace.arrival_s) == {0.0}


def test_fixed_lengths_are_all_alike() -> None:
    trace = fixed_lengths(5, 1, prompt_tokens=3, output_tokens=9)
    assert (list(trace.prompt_tokens), list(trace.output_tokens), trace.name) == ([3] * 5, [9] * 5, "fixed")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generate("W9", 1, 0), "shape = 'W9' is not allowed: one of W1, W2"),
        (lambda: generate("W2", 0, 0), "num_requests = 0 is not allowed: at least 1"),
        (lambda: generate("W2", 9, 0, rate=0.0), "rate = 0.0 is not allowed"),
        (lambda: generate("W2", 9, 0).scaled(0), "divisor = 0 is not allowed"),
        (lambda: spread_lengths(1, 0, prompt_tokens=1, mean_output_tokens=1, spread=2.0), "spread = 2.0"),
        (lambda: spread_lengths(1, 0, prompt_tokens=0, mean_output_tokens=1, spread=0.0), "prompt_tokens = 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()  # type: ignore[operator]


def test_the_summary_says_what_was_drawn() -> None:
    summary = generate("W8-shared-prefix", 64, 1, rate=2.0).summary()
    assert summary["num_requests"] == 64 and summary["requests_per_s"] == 2.0
    assert summary["prompt_tokens"] == {"mean": 2176.0, "quantiles": [2176] * 15}
