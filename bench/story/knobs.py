"""One setting at a time, in the order of repair: each row differs from the row before in one setting, on the same
requests.

    max_num_seqs       up, while the KV pool stays as it is
    chunked prefill    off, on, then on with a smaller step budget; short and long prompts mixed, arrivals apart
    watermark          0, 0.01, 0.05 of the blocks kept free at admission, in a pool that is too small
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from bench.simulate.step_cost import StepCost
from bench.story.closed_form import closed_form
from bench.story.lengths import draw, two_humped
from bench.story.study import KnobStudy, Setting, unbounded_queue
from bench.traces.trace import Trace
from replica.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PressureSize:
    """Requests that outgrow a small KV pool: `num_prompt_tokens` in, W2-shaped outputs. `max_num_seqs`: from where
    places are the limit to where the pool is."""

    num_requests: int
    num_prompt_tokens: int
    mean_output_tokens: int
    num_blocks: int
    block_size: int
    max_num_seqs: tuple[int, ...]
    max_num_batched_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class MixSize:
    """Short prompts and a share of long ones, apart in time, at a share (`load`) of what the engine can take."""

    num_requests: int
    num_short_tokens: int
    num_long_tokens: int
    long_share: float
    mean_output_tokens: int
    load: float
    max_num_seqs: int
    max_num_batched_tokens: int
    small_num_batched_tokens: int
    seed: int


def pressure_studies(size: PressureSize) -> tuple[KnobStudy, KnobStudy]:
    """`max_num_seqs` and `watermark`, on one load and one pool."""
    lengths = draw(two_humped(size.mean_output_tokens), size.num_requests, 1, size.seed)
    count = len(lengths)
    prompts = array("i", [size.num_prompt_tokens]) * count
    trace = Trace("pressure", size.seed, array("d", [0.0]) * count, prompts, array("i", lengths))
    top = max(size.max_num_seqs)
    base = unbounded_queue(max_num_seqs=top, max_num_batched_tokens=size.max_num_batched_tokens, watermark=0.05)
    capacity = size.num_blocks * size.block_size
    model = ModelConfig(num_blocks=size.num_blocks, block_size=size.block_size, max_model_len=capacity)
    seqs = (Setting(f"{num}", live={"max_num_seqs": num, "watermark": 0.01}) for num in size.max_num_seqs)
    marks = (Setting(f"{share:g}", live={"max_num_seqs": top, "watermark": share}) for share in (0.0, 0.01, 0.05))
    return (
        KnobStudy("max_num_seqs", trace, base, model, tuple(seqs)),
        KnobStudy("watermark", trace, base, model, tuple(marks)),
    )


def chunked_study(size: MixSize, cost: StepCost) -> KnobStudy:
    """Chunked prefill. The whole budget holds the longest context, or no prompt could enter whole."""
    trace = _mixed(size, cost)
    longest = size.num_long_tokens + max(trace.output_tokens)
    base = unbounded_queue(max_num_seqs=size.max_num_seqs, max_num_batched_tokens=size.max_num_batched_tokens)
    off, on = {"enable_chunked_prefill": False}, {"enable_chunked_prefill": True}
    budget, small = size.max_num_batched_tokens, size.small_num_batched_tokens
    rows = (
        Setting(f"off, budget {budget}", off),
        Setting(f"on, budget {budget}", on, {"max_num_batched_tokens": budget}),
        Setting(f"on, budget {small}", on, {"max_num_batched_tokens": small}),
    )
    return KnobStudy("chunked prefill", trace, base, ModelConfig(max_model_len=longest), rows)


def _mixed(size: MixSize, cost: StepCost) -> Trace:
    source = random.Random(size.seed)
    distribution = two_humped(size.mean_output_tokens)
    mean_prompt = size.num_short_tokens + size.long_share * (size.num_long_tokens - size.num_short_tokens)
    full = closed_form(distribution, size.max_num_seqs, round(mean_prompt), cost)
    rate = size.load * size.max_num_seqs / full.seconds_continuous
    every = round(1 / size.long_share)
    arrivals, now_s = array("d"), 0.0
    for _ in range(size.num_requests):
        arrivals.append(now_s)
        now_s += source.expovariate(rate)
    is_long = (number % every == every - 1 for number in range(size.num_requests))
    prompts = array("i", (size.num_long_tokens if long else size.num_short_tokens for long in is_long))
    outputs = array("i", draw(distribution, size.num_requests, 1, size.seed))
    return Trace("mixed", size.seed, arrivals, prompts, outputs)
