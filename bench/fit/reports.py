"""Tables of a fit and of a validation, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.fit.fitting import Fit
from bench.fit.micro import Point
from bench.fit.validation import JUDGED, TOLERANCE, LoadComparison
from bench.simulate.step_cost import StepCost


def points_table(points: Sequence[Point], fit: Fit) -> Iterator[str]:
    """One line a point: what it computed, what it took, what the cost says."""
    yield f"{'benchmark':26} {'prefill':>7} {'chunks':>6} {'decodes':>7} {'KV read':>8} {'n':>3} {'ms':>8} {'error':>7}"
    for point, error in zip(points, fit.errors, strict=True):
        work = point.work
        yield (
            f"{point.benchmark:26} {work.num_prefill_tokens:7} {work.num_chunks:6} {work.num_decode_seqs:7} "
            f"{work.num_kv_tokens_read:8} {point.num_samples:3} {1e3 * point.seconds:8.2f} {error:+7.1%}"
        )


def cost_table(cost: StepCost) -> Iterator[str]:
    """The cost's numbers in units that can be read."""
    yield f"fixed            {1e3 * cost.fixed_s:9.3f} ms a step"
    yield f"prefill token    {1e6 * cost.prefill_token_s:9.3f} us"
    yield f"decode sequence  {1e6 * cost.decode_seq_s:9.3f} us"
    yield f"KV token read    {1e9 * cost.kv_token_s:9.3f} ns, in pieces of {cost.kv_granule_tokens}"
    yield f"prefill pair     {1e9 * cost.prefill_pair_s:9.3f} ns"
    yield f"chunk            {1e6 * cost.chunk_s:9.3f} us"
    for num_tokens, seconds in cost.token_curve:
        yield f"curve at {num_tokens:5}   {1e3 * seconds:9.3f} ms"


def validation_table(found: Sequence[LoadComparison]) -> Iterator[str]:
    """Measured beside simulated, in the play whose error is the middle one; judged numbers carry their verdict. `all`:
    the error of every play."""
    yield f"{'load':8} {'number':22} {'measured':>10} {'simulated':>10} {'error':>7}  all"
    for comparison in found:
        plays = comparison.plays
        for name in plays[0].measured:
            middle = comparison.middle(name)
            measured, simulated = middle.measured[name], middle.simulated[name]
            error = comparison.error(name)
            verdict = ("  ok" if abs(error) <= TOLERANCE else "  OUTSIDE") if name in JUDGED else ""
            every = " ".join(f"{play.error(name):+.1%}" for play in comparison.by_error(name))
            yield f"{comparison.load:8} {name:22} {measured:10.4g} {simulated:10.4g} {error:+7.1%}  {every}{verdict}"
        speeds = ", ".join(f"{play.speed_before:.3f} and {play.speed_after:.3f}" for play in plays)
        yield f"{comparison.load:8} reference steps before and after, x the fit's seconds: {speeds}"
    agrees = all(comparison.agrees for comparison in found)
    yield f"{' and '.join(JUDGED)} within {TOLERANCE:.0%} on every load: {'yes' if agrees else 'no'}"
