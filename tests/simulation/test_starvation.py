"""One huge prompt in a stream of small requests, in virtual time: neither starves the other."""

from __future__ import annotations

import random
from functools import cache

import pytest

from bench.simulate.replica import Ended, SimulatedReplica
from bench.simulate.step_cost import StepCost
from bench.simulate.step_totals import StepTotals
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import FinishReason, GenerationRequest, SamplingParams

SHAPE = ModelShape(num_blocks=128, block_size=16, vocab_size=1000, max_model_len=4096, eos_token_ids=())
COST = StepCost(fixed_s=0.02, prefill_token_s=0.0005, decode_seq_s=0.001, kv_token_s=0.0, prefill_pair_s=0.0)
NUM_SMALL = 4000
HUGE = NUM_SMALL


def request(number: int, num_prompt: int) -> GenerationRequest:
    rng = random.Random(number)
    prompt = tuple(rng.randrange(1000) for _ in range(num_prompt))
    return GenerationRequest(str(number), prompt, SamplingParams(max_tokens=8, ignore_eos=True))


def served(requests_per_s: float, huge_at_s: float | None = None) -> tuple[list[float], dict[int, Ended]]:
    """Arrivals (Poisson) of requests of 32 + 8 tokens, and what became of each; the huge one needs 90 % of the pool."""
    config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_num_queued_seqs=NUM_SMALL + 1, queue_timeout_s=1e6
    )
    replica = SimulatedReplica(config, SHAPE, COST, StepTotals())
    rng = random.Random(11)
    arrivals: list[float] = []
    at_s = 0.0
    for number in range(NUM_SMALL):
        at_s += rng.expovariate(requests_per_s)
        arrivals.append(at_s)
        if huge_at_s is not None and at_s >= huge_at_s:
            replica.submit(HUGE, request(HUGE, SHAPE.num_blocks * SHAPE.block_size * 9 // 10), huge_at_s)
            huge_at_s = None
        replica.submit(number, request(number, 32), at_s)
    replica.advance(float("inf"))
    return arrivals, {ended.number: ended for ended in replica.ended}


@cache
def load_of_80_percent() -> float:
    """Small requests a second: 80 % of what is served when all come at once."""
    _, ended = served(1e9)
    return 0.8 * NUM_SMALL / max(one.end_s for one in ended.values())


def p95_ttft_s(arrivals: list[float], ended: dict[int, Ended]) -> float:
    waits = [(ended[number].first_token_s or 0.0) - at_s for number, at_s in enumerate(arrivals)]
    return sorted(waits)[int(0.95 * len(waits))]


@pytest.fixture(scope="module")
def with_huge() -> tuple[list[float], dict[int, Ended]]:
    rate = load_of_80_percent()
    return served(rate, huge_at_s=0.2 * NUM_SMALL / rate)


def test_small_requests_hardly_wait_longer_for_a_huge_one(with_huge: tuple[list[float], dict[int, Ended]]) -> None:
    alone = p95_ttft_s(*served(load_of_80_percent()))
    beside = p95_ttft_s(*with_huge)
    arrivals, ended = with_huge
    worst = max((ended[number].first_token_s or 0.0) - at_s for number, at_s in enumerate(arrivals))
    print(f"p95 TTFT {alone:.2f} s alone, {beside:.2f} s beside the huge prompt, worst {worst:.2f} s")
    assert beside < 3 * alone
    assert worst < 5.0, "the huge prompt's own work is 1.5 s of steps, at 80 % load 7.5 s of backlog"


def test_a_huge_prompt_begins_while_small_ones_keep_coming(with_huge: tuple[list[float], dict[int, Ended]]) -> None:
    arrivals, ended = with_huge
    huge = ended[HUGE]
    begun_s = (huge.first_token_s or 0.0) - 0.2 * NUM_SMALL / load_of_80_percent()
    print(f"the huge prompt's first token after {begun_s:.1f} s; the stream lasts {arrivals[-1]:.0f} s")
    assert huge.reason is FinishReason.LENGTH and begun_s < 20.0
    assert huge.end_s < arrivals[-1], "it didn't have to wait for the end of the stream"
