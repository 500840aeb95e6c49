"""Fixed batches against continuous ones on the same requests, while the output lengths spread.

Each spread: the same requests, all present, are played to an engine with `batching = static` and to one with
`continuous`; nothing else differs. Gains are per output token, over the steps that count
(`measures.without_drain`), and are held against the closed form:

    with equal lengths the two tie                     within 5 %
    gain in steps = E[max of the batch] / E[L]         within 5 %
    gain in seconds = the same work, fewer fixed parts within 10 %

Seconds are those of undisturbed steps (`measures.Window`), so the checks are about the engine, not about the hour. The
gain as timed is told beside them, and of equal lengths also whether it is a tie.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.fit.engine import MeasuredEngine
from bench.simulate.step_cost import StepCost
from bench.story.checks import Check
from bench.story.closed_form import ClosedForm, closed_form
from bench.story.lengths import LengthDistribution, draw
from bench.story.measures import Summary, over_time, sparkline, summary, waiting_at, without_drain
from bench.story.replay import Replay, as_one_play, replay
from bench.traces.trace import Trace

TIE_TOLERANCE = 0.05
STEPS_TOLERANCE = 0.05
SECONDS_TOLERANCE = 0.10
_PICTURE_PARTS = 30
PICTURE_BATCHES = 3


@dataclass(frozen=True, slots=True)
class SpreadSize:
    """`num_batches` fixed batches of `batch_size` requests, which is `max_num_seqs` too. Fixed
    batches are played in `num_parts` equal parts, around the continuous ones."""

    batch_size: int
    num_batches: int
    num_parts: int
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
    """One spread: both sides, what was gained and what had to be. `gain_in_seconds` is of undisturbed steps,
    `gain_as_timed` of all as they were."""

    name: str
    mean_output_tokens: float
    longest_output_tokens: int
    static: Side
    continuous: Side
    gain_in_steps: float
    gain_in_seconds: float
    gain_as_timed: float
    predicted: ClosedForm

    @property
    def must_tie(self) -> bool:
        """All answers are equally long: nothing is wasted that could be gained."""
        return self.longest_output_tokens == self.mean_output_tokens

    def checks(self) -> list[Check]:
        steps, seconds = f"{self.name}: gain in steps", f"{self.name}: gain in undisturbed seconds"
        checks = [
            Check(f"{steps} is the closed form", self.gain_in_steps, self.predicted.gain_in_steps, STEPS_TOLERANCE),
            Check(f"{seconds} is explained", self.gain_in_seconds, self.predicted.gain_in_seconds, SECONDS_TOLERANCE),
        ]
        if self.must_tie:
            checks.append(Check(f"{seconds} is a tie", self.gain_in_seconds, 1.0, TIE_TOLERANCE))
        return checks

    def tie_as_timed(self) -> str | None:
        """Of equal lengths: whether they tie in the seconds that went by too. Not checked: on a shared machine the two
        sides don't get the same share of it."""
        if not self.must_tie:
            return None
        off = self.gain_as_timed - 1.0
        verdict = "also a tie" if abs(off) <= TIE_TOLERANCE else "a tie is not shown"
        return f"{self.name}: gain in seconds as timed: {self.gain_as_timed:.3f} ({off:+.1%}), not checked: {verdict}"


def spread_trace(distribution: LengthDistribution, size: SpreadSize) -> Trace:
    """All requests at time 0, in batches of independent lengths."""
    return _present(distribution.name, size, draw(distribution, size.num_batches, size.batch_size, size.seed))


def _present(name: str, size: SpreadSize, lengths: Sequence[int]) -> Trace:
    count = len(lengths)
    return Trace(
        name=f"spread {name}",
        seed=size.seed,
        arrival_s=array("d", [0.0]) * count,
        prompt_tokens=array("i", [size.num_prompt_tokens]) * count,
        output_tokens=array("i", lengths),
    )


def _parts(trace: Trace, size: SpreadSize) -> list[Trace]:
    """The same requests in parts of whole batches."""
    count = size.num_batches // size.num_parts * size.batch_size
    cuts = range(0, len(trace), count)
    return [_present(f"{trace.name} from {cut}", size, trace.output_tokens[cut : cut + count]) for cut in cuts]


def play_spreads(
    static: MeasuredEngine,
    continuous: MeasuredEngine,
    distributions: Iterable[LengthDistribution],
    size: SpreadSize,
    cost: StepCost,
    progress: Callable[[str], None],
) -> Iterator[SpreadRow]:
    """The two engines in turn: half of the fixed batches before the continuous ones, half after them, so that a machine
    that slows down slows both."""
    for distribution in distributions:
        trace, label = spread_trace(distribution, size), f"output lengths {distribution.name}"
        parts = _parts(trace, size)
        before = -(-len(parts) // 2)
        fixed = [replay(static, part, progress, f"{label}, fixed batches") for part in parts[:before]]
        refilled = replay(continuous, trace, progress, f"{label}, continuous")
        fixed += [replay(static, part, progress, f"{label}, more fixed batches") for part in parts[before:]]
        predicted = closed_form(distribution, size.batch_size, size.num_prompt_tokens, cost)
        yield _row(distribution, size, as_one_play(fixed), refilled, predicted)


def _row(
    distribution: LengthDistribution, size: SpreadSize, static: Replay, continuous: Replay, predicted: ClosedForm
) -> SpreadRow:
    before, after = without_drain(static, static=True), without_drain(continuous, static=False)
    picture_s = _end_of_batches(static, size)
    nobody_waits_s = continuous.steps.ended_s[after.num_steps]
    more_tokens = after.num_output_tokens / before.num_output_tokens
    return SpreadRow(
        name=distribution.name,
        mean_output_tokens=distribution.mean,
        longest_output_tokens=distribution.longest,
        static=_side(static, size, picture_s, nobody_waits_s),
        continuous=_side(continuous, size, picture_s, nobody_waits_s),
        gain_in_steps=more_tokens * before.num_steps / after.num_steps,
        gain_in_seconds=more_tokens * before.undisturbed_s / after.undisturbed_s,
        gain_as_timed=more_tokens * before.seconds / after.seconds,
        predicted=predicted,
    )


def _side(played: Replay, size: SpreadSize, picture_s: float, nobody_waits_s: float) -> Side:
    widths = over_time(played, played.steps.width, _PICTURE_PARTS, picture_s)
    return Side(summary(played), sparkline(widths, size.batch_size), waiting_at(played, nobody_waits_s))


def _end_of_batches(static: Replay, size: SpreadSize) -> float:
    """When the first few fixed batches had ended."""
    left = size.batch_size * (size.num_batches - PICTURE_BATCHES)
    steps = static.steps
    last = max((i for i, waiting in enumerate(steps.waiting) if waiting >= left), default=len(steps) - 1)
    return steps.ended_s[last]
