"""The sampler's choice: exact filters, the right distribution, and nothing but the row's own input decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from replica.model.sampler import Sampler, uniform_draws
from replica.request import SamplingParams
from replica.scheduler.plan import JoinedSequence, StepPlan

_EOS = 3


def _plan(num_rows: int, output_index: Sequence[int] | None = None, masks: dict[int, bytes] | None = None) -> StepPlan:
    rows = list(range(num_rows))
    ones = [1] * num_rows
    return StepPlan(
        step=1,
        seq_ids=rows,
        lanes=rows,
        starts=[0] * num_rows,
        num_tokens=ones,
        block_tables=[[0]] * num_rows,
        samples=[True] * num_rows,
        num_logits=ones,
        output_index=list(output_index or [0] * num_rows),
        token_ids=ones,
        token_masks=masks or {},
    )


def _sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    plan: StepPlan | None = None,
) -> tuple[list[int], list[bool]]:
    sampler = Sampler(len(params), logits.shape[-1], [_EOS])
    for lane, sampling in enumerate(params):
        sampler.join(JoinedSequence(lane, lane, sampling, seeds[lane] if seeds else lane, 0))
    tokens, sound = sampler.sample(logits.clone(), plan or _plan(len(params)), range(len(params)))
    return tokens.tolist(), sound.tolist()


def _params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **changes})  # type: ignore[arg-type]


def _frequencies(logits: Tensor, params: SamplingParams, num_draws: int) -> np.ndarray:
    rows = logits.expand(num_draws, -1)
    tokens, _ = _sample(rows, [params] * num_draws, seeds=range(1000, 1000 + num_draws))
    return np.bincount(tokens, minlength=logits.shape[-1])


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float((((counts - expected) ** 2)[kept] / expected[kept]).sum())


_LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 2.5])


def _softmax(temperature: float = 1.0) -> np.ndarray:
    return torch.softmax(_LOGITS.double() / temperature, dim=-1).numpy()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, None),
        ({"temperature": 0.5}, None),
        ({"temperature": 3.0}, None),
        ({"top_k": 3}, {7, 2, 5}),
        ({"top_p": 0.7}, {7, 2, 5}),
        ({"top_k": 5, "top_p": 0.5}, {7, 2}),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, float], kept: set[int] | None) -> None:
    probabilities = _softmax(params.get("temperature", 1.0))
    if kept is not None:
        probabilities = np.where([token in kept for token in range(8)], probabilities, 0.0)
        probabilities /= probabilities.sum()
    counts = _frequencies(_LOGITS, _params(**params), 20_000)
    # 99.99 % of true draws stay below this at 7 degrees of freedom; the seeds are fixed, so the test is exact.
    assert _chi_square(counts, probabilities) < 30


def test_top_p_wider_than_the_first_look_sorts_the_whole_row() -> None:
    logits = torch.zeros(1000)
    logits[500:] = -50.0
    counts = _frequencies(logits, _params(top_p=0.999), 1_000)
    assert counts[500:].sum() == 0
    assert 380 < np.count_nonzero(counts) <= 500


def test_top_k_wider_than_the_first_look_keeps_exactly_k() -> None:
    logits = torch.arange(1000, dtype=torch.float32) / 1000
    counts = _frequencies(logits, _params(top_k=300), 1_000)
    assert counts[:700].sum() == 0
    assert counts[700:720].sum() > 0


def test_greedy_and_tiny_temperatures_take_the_largest_logit() -> None:
    params = [_params(temperature=t) for t in (0.0, 1e-6, 1e-4, 0.01)]
    assert _sample(_LOGITS.expand(4, -1), params)[0] == [7, 7, 7, 7]


def test_top_k_one_and_a_tiny_top_p_take_the_largest_logit() -> None:
    params = [_params(top_k=1), _params(top_p=1e-9), _params(top_k=1, top_p=0.5, temperature=5.0)]
    assert _sample(_LOGITS.expand(3, -1), params)[0] == [7, 7, 7]


def test_a_row_draws_the_same_token_whoever_its_neighbours_are() -> None:
    kinds = [_params(), _params(top_p=0.9), _params(top_k=4), _params(temperature=0.0), _params(temperature=2.0)]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 600, generator=generator) * 3
    params = [kinds[row % len(kinds)] for row in range(40)]
    together, _ = _sample(logits, params)
    alone = [_sample(logits[row : row + 1], [params[row]], seeds=[row])[0][0] for row in range(40)]
    assert together == alone


def test_a_draw_depends_on_seed_and_number_only() -> None:
    seeds = np.array([7, 7, 8, 2**64 - 1], dtype=np.uint64)
    numbers = np.array([0, 1, 0, 0], dtype=np.int64)
    draws = uniform_draws(seeds, numbers)
    assert len(set(draws.tolist())) == 4
    assert draws.tolist() == [uniform_draws(seeds[i : i + 1], numbers[i : i + 1])[0] for i in range(4)]


def test_draws_are_uniform_over_seeds_and_over_numbers() -> None:
    many = np.arange(100_000)
    for draws in (
        uniform_draws(many.astype(np.uint64), np.zeros(100_000, dtype=np.int64)),
        uniform_draws(np.full(100_000, 5, dtype=np.uint64), many),
    ):
        assert draws.min() >= 0.0 and draws.max() < 1.0
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert _chi_square(counts, np.full(100, 0.01)) < 160
        pairs = np.histogram2d(draws[:-1], draws[1:], bins=10, range=[[0, 1], [0, 1]])[0].ravel()
        assert _chi_square(pairs, np.full(100, 0.01)) < 160


def test_a_row_with_nan_or_infinity_is_unsound_and_alone_in_that() -> None:
    logits = torch.zeros(4, 8)
    logits[:, 5] = 1.0
    logits[1, 2] = float("nan")
    logits[3, 2] = float("inf")
    params = [_params(temperature=0.0), _params(temperature=0.0), _params(temperature=0.0), _params(top_p=0.5)]
    tokens, sound = _sample(logits, params)
    assert sound == [True, False, True, False]
    assert (tokens[0], tokens[2]) == (5, 5)
    assert all(0 <= token < 8 for token in tokens)


def test_a_mask_forbids_tokens_bit_by_bit() -> None:
    mask = bytes([0b00010010])  # tokens 1 and 4
    plan = _plan(2, masks={1: mask})
    tokens, sound = _sample(_LOGITS.expand(2, -1), [_params(temperature=0.0)] * 2, plan=plan)
    assert (tokens, sound) == ([7, 1], [True, True])
    plan = _plan(200, masks=dict.fromkeys(range(200), mask))
    assert set(_sample(_LOGITS.expand(200, -1), [_params()] * 200, plan=plan)[0]) == {1, 4}


def test_a_mask_that_allows_nothing_fails_its_row_only() -> None:
    tokens, sound = _sample(_LOGITS.expand(2, -1), [_params()] * 2, plan=_plan(2, masks={0: b"\x00"}))
    assert sound == [False, True]
    assert tokens[0] == 0


def test_eos_and_stop_ids_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 9.0, 7.0]])
    params = _params(temperature=0.0, min_tokens=2, stop_token_ids=(4,))
    assert _sample(logits, [params], plan=_plan(1, output_index=[1]))[0] == [2]
    assert _sample(logits, [params], plan=_plan(1, output_index=[2]))[0] == [_EOS]
    ignoring = _params(temperature=0.0, min_tokens=2, stop_token_ids=(4,), ignore_eos=True)
    assert _sample(logits, [ignoring], plan=_plan(1, output_index=[1]))[0] == [_EOS]


def test_logits_beyond_the_vocabulary_are_never_chosen() -> None:
    sampler = Sampler(1, 4, [])
    sampler.join(JoinedSequence(0, 0, _params(temperature=0.0), 0, 0))
    tokens, _ = sampler.sample(torch.tensor([[0.0, 2.0, 1.0, 0.0, 99.0]]), _plan(1), [0])
    assert tokens.tolist() == [1]
