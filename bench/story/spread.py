"""Fixed batches against continuous ones on the same requests, while the output lengths spread.

Each spread: the same requests, all present, are played to an engine with `batching = static` and to one with
`continuous`; nothing else differs. Gains are per output token, over the steps that count
(`measures.without_drain`), and are held against the closed form:

    with equal lengths the two tie                     within 5 %
    gain in steps = E[max of the batch] / E[L]         within 5 %
    gain in seconds = the same work, fewer fixed parts within 10 %
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bench.fit.engine import MeasuredEngine
from bench.simulate.step_cost import StepCost
from bench.story.checks import Check
from bench.story.closed_form import ClosedForm, closed_form
from bench.story.lengths import LengthDistribution, draw
from bench.story.measures import Summary, over_time, sparkline, summary, waiting_at, without_drain
from bench.story.replay import Replay, replay
from bench.traces.trace import Trace

TIE_TOLERANCE = 0.05
STEPS_TOLERANCE = 0.05
SECONDS_TOLERANCE = 0.10
_PICTURE_PARTS = 30
PICTURE_BATCHES = 3


@dataclass(frozen=True, slots=True)
class SpreadSize:
    """`num_batches` fixed batches of `batch_size` requests, which is `max_num_seqs` too."""

    batch_size: int
    num_batches: int
    num_prompt_tokens: int
    mean_output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two ways. `picture`: batch width over the time of the first few fixed batches. `waiting_then`:
    how many wait when nobody waits for a continuous batch any more."""

    whole: Summary
    picture: str
    waiting_then: int


@dataclass(frozen=True, slots=True)
class SpreadRow:
    """One spread: both sides, what was gained and what had to be."""

    name: str
    mean_output_tokens: float
    longest_output_tokens: int
    static: Side
    continuous: Side
    gain_in_steps: float
    gain_in_seconds: float
    predicted: ClosedForm

    def checks(self) -> list[Check]:
        steps, seconds = f"{self.name}: gain in steps", f"{self.name}: gain in seconds"
        checks = [
            Check(f"{steps} is the closed form", self.gain_in_steps, self.predicted.gain_in_steps, STEPS_TOLERANCE),
            Check(f"{seconds} is explained", self.gain_in_seconds, self.predicted.gain_in_seconds, SECONDS_TOLERANCE),
        ]
        if self.name == "equal":
            checks.append(Check(f"{seconds} is a tie", self.gain_in_seconds, 1.0, TIE_TOLERANCE))
        return checks


def spread_trace(distribution: LengthDistribution, size: SpreadSize) -> Trace:
    """All requests at time 0, in batches of independent lengths."""
    lengths = draw(distribution, size.num_batches, size.batch_size, size.seed)
    count = len(lengths)
    return Trace(
        name=f"spread {distribution.name}",
        seed=size.seed,
        arrival_s=array("d", [0.0]) * count,
        prompt_tokens=array("i", [size.num_prompt_tokens]) * count,
        output_tokens=array("i", lengths),
    )


def play_spreads(
    static: MeasuredEngine,
    continuous: MeasuredEngine,
    distributions: Iterable[LengthDistribution],
    size: SpreadSize,
    cost: StepCost,
    progress: Callable[[str], None],
) -> Iterator[SpreadRow]:
    """The two engines in turn, spread by spread, so that a machine that slows down slows both."""
    for distribution in distributions:
        trace = spread_trace(distribution, size)
        sides = []
        for name, engine in (("fixed batches", static), ("continuous", continuous)):
            sides.append(replay(engine, trace, progress, f"output lengths {distribution.name}, {name}"))
        predicted = closed_form(distribution, size.batch_size, size.num_prompt_tokens, cost)
        yield _row(distribution, size, sides[0], sides[1], predicted)


def _row(
    distribution: LengthDistribution, size: SpreadSize, static: Replay, continuous: Replay, predicted: ClosedForm
) -> SpreadRow:
    before, after = without_drain(static, static=True), without_drain(continuous, static=False)
    picture_s = min(static.seconds, _end_of_batches(static, size))
    queue_empty_s = continuous.steps.ended_s[after.num_steps]
    sides = (
        Side(
            summary(replayed),
            sparkline(over_time(replayed, replayed.steps.width, _PICTURE_PARTS, picture_s), size.batch_size),
            waiting_at(replayed, queue_empty_s),
        )
        for replayed in (static, continuous)
    )
    return SpreadRow(
        name=distribution.name,
        mean_output_tokens=distribution.mean,
        longest_output_tokens=distribution.longest,
        static=next(sides),
        continuous=next(sides),
        gain_in_steps=after.tokens_per_step / before.tokens_per_step,
        gain_in_seconds=after.tokens_per_s / before.tokens_per_s,
        predicted=predicted,
    )


def _end_of_batches(static: Replay, size: SpreadSize) -> float:
    """When the first few fixed batches had ended."""
    left = size.batch_size * (size.num_batches - PICTURE_BATCHES)
    steps = static.steps
    last = max((i for i, waiting in enumerate(steps.waiting) if waiting >= left), default=len(steps) - 1)
    return steps.ended_s[last]
