"""Is the simulator right? Three loads that the fit never saw, on the real engine and in the simulator.

    steady   W2 lengths / 16, Poisson arrivals at 0.8 x capacity
    spread   W7 lengths / 4, all present: many tiny, few huge
    shared   W8 shared prefix / 16, Poisson arrivals at 2 x capacity: the queue grows

Near capacity a queue magnifies what it is made of: at r x capacity one percent of speed is 1 / (1 - r) percent of
waiting below it and r / (r - 1) above. At 1.1 x that would be eleven, and the machine's own drift would be all that is
measured; 0.8 and 2 keep it to five and two. Capacity is what the simulator makes of the same lengths when all requests
are present.

Same trace, same settings, the same way of counting on both sides. A machine isn't always equally fast, so before and
after each play of a load a few micro-benchmarks are measured again; how much longer they took than in the fit is the
play's speed factor, by which its simulation is stretched. Nothing is ever taken from the loads themselves. Speed also
changes within a play: the loads are played in turn, in several rounds, and each number is judged by the play whose
error is the middle one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bench.fit.engine import MeasuredEngine, Played
from bench.fit.fitting import speed_of
from bench.fit.micro import MicroBenchmarks, reference_steps
from bench.fit.observed import observed, orders_of, requests_of, simulated
from bench.simulate.outcome import Objectives, Outcome
from bench.simulate.step_cost import StepCost
from bench.traces.generate import generate
from bench.traces.trace import Trace
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import GenerationRequest

TOLERANCE = 0.15
ROUNDS = 3
JUDGED = ("ttft_p50_s", "output_tokens_per_s")
_NO_OBJECTIVES = Objectives(float("inf"), float("inf"))
_PROBE_REQUESTS = 256
_LEAST_REQUESTS = 8
_SEEDS_APART = 10
"""Between rounds: the prefix cache would still know the prompts of the same seed."""

Progress = Callable[[str], None]


class ValidationLoad(NamedTuple):
    """`of_capacity`: arrivals as a share of what the replica can do; None: all present at once."""

    name: str
    shape: str
    divisor: int
    of_capacity: float | None
    seed: int


LOADS = (
    ValidationLoad("steady", "W2", 16, 0.8, 101),
    ValidationLoad("spread", "W7", 4, None, 102),
    ValidationLoad("shared", "W8-shared-prefix", 16, 2.0, 103),
)


@dataclass(frozen=True, slots=True)
class Play:
    """One play of a load: what was measured and what was simulated, by name; `speed_before` and `speed_after` are the
    factors of the reference steps (more is slower)."""

    num_requests: int
    speed_before: float
    speed_after: float
    measured: dict[str, float]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """(simulated - measured) / measured."""
        return self.simulated[name] / self.measured[name] - 1.0


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """All plays of one load, an odd number of them."""

    load: str
    plays: tuple[Play, ...]

    def by_error(self, name: str) -> list[Play]:
        """The plays, by their error in this number."""
        return sorted(self.plays, key=lambda play: play.error(name))

    def middle(self, name: str) -> Play:
        """The play that counts for this number."""
        return self.by_error(name)[len(self.plays) // 2]

    def error(self, name: str) -> float:
        return self.middle(name).error(name)

    @property
    def agrees(self) -> bool:
        return all(abs(self.error(name)) <= TOLERANCE for name in JUDGED)

    def as_json(self) -> dict[str, Any]:
        errors = {name: self.error(name) for name in self.plays[0].measured}
        return asdict(self) | {"errors": errors, "agrees": self.agrees}


def trace_of(load: ValidationLoad, seconds: float, limits: SchedulerConfig, shape: ModelShape, cost: StepCost) -> Trace:
    """As many requests as the replica works on for about `seconds`, at the load's arrivals."""
    probe = generate(load.shape, _PROBE_REQUESTS, load.seed).scaled(load.divisor).all_present()
    outcome = simulated(probe, requests_of(probe, shape.vocab_size), limits, shape, cost)
    capacity = outcome.summary(_NO_OBJECTIVES)["throughput_requests_per_s"]
    trace = generate(load.shape, max(_LEAST_REQUESTS, round(capacity * seconds)), load.seed, 1.0).scaled(load.divisor)
    return trace.all_present() if load.of_capacity is None else trace.at_rate(load.of_capacity * capacity)


def validate(
    engine: MeasuredEngine,
    cost: StepCost,
    seconds: float,
    progress: Progress,
    loads: tuple[ValidationLoad, ...] = LOADS,
    rounds: int = ROUNDS,
) -> list[LoadComparison]:
    """Plays each load once a round, `seconds` of work each time, on `engine`, which is idle, and in the simulator.

    Raises `ValueError` when the engine did something else than its scheduler plans.
    """
    speedometer = _Speedometer(engine, cost, progress)
    before = speedometer.read("before the first load")
    plays: dict[str, list[Play]] = {load.name: [] for load in loads}
    for number in range(rounds):
        for load in loads:
            title = f"load {load.name}, {number + 1}/{rounds}"
            fresh = load._replace(seed=load.seed + _SEEDS_APART * number)
            trace, requests, played = _play(engine, cost.slowed(before), seconds, fresh, title, progress)
            after = speedometer.read(f"after {title}")
            limits, shape = engine.config.scheduler, engine.shape
            expected = simulated(trace, requests, limits, shape, cost.slowed((before + after) / 2))
            real = observed(trace, requests, played, shape)
            plays[load.name].append(Play(len(trace), before, after, numbers_of(real), numbers_of(expected)))
            before = after
    return [LoadComparison(name, tuple(found)) for name, found in plays.items()]


class _Speedometer:
    """Measures the reference steps."""

    def __init__(self, engine: MeasuredEngine, cost: StepCost, progress: Progress) -> None:
        self._micro = MicroBenchmarks(engine, seed=1)
        self._steps = reference_steps(engine.config.scheduler)
        self._cost = cost
        self._progress = progress

    def read(self, when: str) -> float:
        """How many times as long as in the fit they take now."""
        self._progress(f"reference steps {when}")
        now = speed_of(self._cost, self._micro.measure(self._steps, range(1), lambda *_: None))
        return now / self._cost.reference_ratio


def _play(
    engine: MeasuredEngine, cost: StepCost, seconds: float, load: ValidationLoad, title: str, progress: Progress
) -> tuple[Trace, list[GenerationRequest], Played]:
    limits, shape = engine.config.scheduler, engine.shape
    trace = trace_of(load, seconds, limits, shape, cost)
    requests = requests_of(trace, shape.vocab_size)
    orders = orders_of(trace, requests, limits)
    return trace, requests, engine.play(orders, _Tenths(title, len(trace), progress).ended)


class _Tenths:
    """Says how far a load is, ten times in all."""

    def __init__(self, name: str, num_requests: int, progress: Progress) -> None:
        self._name = name
        self._num_requests = num_requests
        self._progress = progress
        self._said = -1

    def ended(self, num_ended: int) -> None:
        if (tenth := 10 * num_ended // self._num_requests) > self._said:
            self._said = tenth
            self._progress(f"{self._name}: {num_ended} of {self._num_requests} requests have ended")


def numbers_of(outcome: Outcome) -> dict[str, float]:
    """What is compared. `tokens_made_per_step`: the batch's mean width, counted by rows that made a token."""
    summary = outcome.summary(_NO_OBJECTIVES)
    return {
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "mean_step_s": summary["mean_step_s"],
        "itl_p50_s": summary["itl_s"]["p50"],
        "e2e_p50_s": summary["e2e_s"]["p50"],
        "num_steps": summary["num_steps"],
        "tokens_made_per_step": outcome.steps.num_output_tokens / outcome.steps.num_steps,
        "num_finished": summary["num_finished"],
    }
