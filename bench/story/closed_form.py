"""What continuous batching must gain over fixed batches, computed from the lengths' distribution alone.

All requests are present, all prompts are alike and fit into the step in which their request enters. A request with L
output tokens then takes part in exactly L steps: the step that computes its prompt yields its first token.

    fixed batch        B requests leave after max(L1 .. LB) steps
    continuous         a place is taken again in the very next step: B requests leave after mean(L) steps
    gain in steps      E[max of B] / E[L]

Seconds: both ways do the same *work* (the same prompt tokens, decode rows and KV tokens read); what differs is how many
steps it is spread over, and so how often the fixed part F of a step is paid. With w for the work of B requests

    gain in seconds    (F * E[max of B] + w) / (F * E[L] + w)

which is below the gain in steps because a wider step costs more. Where a cost has a curve over a step's tokens, w isn't
the same: then the curve is averaged over the tokens that a step has. In step t of a fixed batch the number of members
left is binomial (B, P(L >= t)); in a continuous batch the number of places just taken is binomial (B, 1 / E[L]), once
the places have drifted apart (which those of equal lengths never do). Drain, the end where nobody waits any more, is
left out of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

from bench.simulate.step_cost import StepCost, StepWork, on_curve
from bench.story.lengths import LengthDistribution


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Steps and seconds that `batch_size` requests take, on average."""

    steps_static: float
    steps_continuous: float
    seconds_static: float
    seconds_continuous: float

    @property
    def gain_in_steps(self) -> float:
        return self.steps_static / self.steps_continuous

    @property
    def gain_in_seconds(self) -> float:
        return self.seconds_static / self.seconds_continuous


def closed_form(
    distribution: LengthDistribution, batch_size: int, num_prompt_tokens: int, cost: StepCost
) -> ClosedForm:
    """For prompts of at least two tokens (a row of one token would count as a decode)."""
    longest, mean = distribution.expected_max(batch_size), distribution.mean
    work = _work_of_requests(distribution, batch_size, num_prompt_tokens, cost.kv_granule_tokens)
    work_s = replace(cost, token_curve=()).seconds(work) - cost.fixed_s
    static_s = cost.fixed_s * longest + work_s + _curve_static(distribution, batch_size, num_prompt_tokens, cost)
    continuous_s = cost.fixed_s * mean + work_s + mean * _curve_continuous(mean, batch_size, num_prompt_tokens, cost)
    if len(distribution.lengths) == 1:
        continuous_s = static_s
    return ClosedForm(longest, mean, static_s, continuous_s)


def _work_of_requests(distribution: LengthDistribution, count: int, num_prompt_tokens: int, granule: int) -> StepWork:
    """The work of `count` requests, on average, as if it were one step's."""
    read, read_upto = 0.0, [0.0, 0.0]
    for step in range(2, distribution.longest + 1):
        context = num_prompt_tokens + step - 1
        read += -(-context // granule) * granule
        read_upto.append(read)
    pairs = zip(distribution.lengths, distribution.probabilities, strict=True)
    mean_read = sum(read_upto[length] * p for length, p in pairs)
    return StepWork(
        num_prefill_tokens=count * num_prompt_tokens,
        num_decode_seqs=round(count * (distribution.mean - 1)),
        num_kv_tokens_read=round(count * mean_read),
        num_prefill_pairs=count * num_prompt_tokens**2 / 2,
        num_chunks=count,
    )


def _curve_static(distribution: LengthDistribution, batch_size: int, num_prompt_tokens: int, cost: StepCost) -> float:
    """The curve's seconds in all steps of one fixed batch."""
    if not cost.token_curve:
        return 0.0
    of_width = [0.0, *(on_curve(cost.token_curve, width) for width in range(1, batch_size + 1))]
    total = on_curve(cost.token_curve, batch_size * num_prompt_tokens)
    for step in range(2, distribution.longest + 1):
        left = _binomial(batch_size, 1.0 - distribution.at_most(step - 1))
        total += sum(p * seconds for p, seconds in zip(left, of_width, strict=True))
    return total


def _curve_continuous(mean: float, batch_size: int, num_prompt_tokens: int, cost: StepCost) -> float:
    """The curve's seconds in one step of a continuous batch."""
    if not cost.token_curve:
        return 0.0
    just_taken = enumerate(_binomial(batch_size, 1.0 / mean))
    more = num_prompt_tokens - 1
    return sum(p * on_curve(cost.token_curve, batch_size + taken * more) for taken, p in just_taken)


def _binomial(count: int, p: float) -> list[float]:
    """Probabilities of 0 to `count` successes."""
    return [comb(count, k) * p**k * (1.0 - p) ** (count - k) for k in range(count + 1)]
