from dataclasses import replace
from itertools import product
from math import prod

import pytest

from bench.simulate.step_cost import H100_8B, StepCost, StepWork
from bench.story.closed_form import closed_form
from bench.story.lengths import LengthDistribution, equal

SMALL = LengthDistribution("small", [(1, 0.5), (2, 0.2), (5, 0.3)])
LINEAR = StepCost(0.05, 0.002, 0.005, 1e-4, 1e-5, chunk_s=3e-3, kv_granule_tokens=4, name="linear")
CURVED = replace(LINEAR, token_curve=((1, 0.01), (2, 0.05), (3, 0.06), (8, 0.2)), name="curved")
PROMPT = 4


def seconds_of_batch(lengths: tuple[int, ...], cost: StepCost) -> float:
    """A fixed batch, step by step."""
    prompts = StepWork(len(lengths) * PROMPT, 0, 0, len(lengths) * PROMPT**2 / 2, len(lengths))
    total = cost.seconds(prompts)
    for step in range(2, max(lengths) + 1):
        width = sum(length >= step for length in lengths)
        granules = -(-(PROMPT + step - 1) // cost.kv_granule_tokens)
        total += cost.seconds(StepWork(0, width, width * granules * cost.kv_granule_tokens, 0.0))
    return total


@pytest.mark.parametrize("cost", [LINEAR, CURVED], ids=lambda cost: cost.name)
def test_a_fixed_batch_takes_the_steps_and_seconds_of_all_possible_batches(cost: StepCost) -> None:
    pairs = list(zip(SMALL.lengths, SMALL.probabilities, strict=True))
    steps = seconds = 0.0
    for batch in product(pairs, repeat=3):
        lengths, p = tuple(length for length, _ in batch), prod(p for _, p in batch)
        steps += p * max(lengths)
        seconds += p * seconds_of_batch(lengths, cost)
    # The decode rows of a batch are rounded to whole ones: 3 requests of 2.4 tokens have 4.2 of them.
    cost_of_one = cost.decode_seq_s + cost.kv_token_s * 8
    found = closed_form(SMALL, 3, PROMPT, cost)
    assert found.steps_static == pytest.approx(steps)
    assert found.seconds_static == pytest.approx(seconds, abs=cost_of_one)
    assert found.steps_continuous == pytest.approx(SMALL.mean)


def test_where_a_step_costs_the_same_however_wide_the_gains_are_one() -> None:
    narrow = StepCost(0.01, 0.0, 0.0, 0.0, 0.0)
    found = closed_form(SMALL, 8, PROMPT, narrow)
    assert found.gain_in_seconds == pytest.approx(found.gain_in_steps)
    assert found.gain_in_steps == pytest.approx(SMALL.expected_max(8) / SMALL.mean)


def test_where_only_tokens_cost_nothing_is_gained_in_seconds() -> None:
    wide = StepCost(1e-9, 0.002, 0.005, 1e-4, 0.0)
    found = closed_form(SMALL, 8, PROMPT, wide)
    assert found.gain_in_steps > 2
    assert found.gain_in_seconds == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("cost", [LINEAR, CURVED, H100_8B], ids=lambda cost: cost.name)
def test_equal_lengths_tie(cost: StepCost) -> None:
    found = closed_form(equal(26), 16, PROMPT, cost)
    assert (found.gain_in_steps, found.gain_in_seconds) == (1.0, 1.0)
