"""What one replica can do: its pace with a full queue, found by simulating it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.simulate.prompt import Prompts
from bench.simulate.replica import SimulatedReplica
from bench.simulate.requests import QUEUE_WITHOUT_BOUNDS, exactly
from bench.simulate.settings import ClusterSettings
from bench.simulate.step_totals import StepTotals
from bench.traces.trace import Trace
from replica.request import FinishReason, GenerationRequest

BATCHES = 6
MIN_PROBES = 64


def num_probes(settings: ClusterSettings) -> int:
    """So many requests make a run whose middle is steady: `BATCHES` times what runs at once."""
    return max(MIN_PROBES, BATCHES * settings.scheduler.max_num_seqs)


def capacity(settings: ClusterSettings, trace: Trace, progress: Callable[[int, int], None]) -> float:
    """Requests per second of one replica while its queue is never empty, on these requests (see `num_probes`).

    All of them are present; counted is from the first quarter of them that ended to the first three quarters, so that
    neither filling nor draining the batch shows. Requests that can never fit don't count. `progress(ended, all)`.
    """
    config = replace(settings.scheduler, **QUEUE_WITHOUT_BOUNDS)
    replica = SimulatedReplica(config, settings.shape, settings.cost, StepTotals())
    prompts = Prompts(trace, settings.shape.vocab_size)
    for number in range(len(trace)):
        request = GenerationRequest("", prompts.lazy(number), exactly(trace.output_tokens[number]))
        replica.submit(number, request, 0.0)
    while not replica.is_idle:
        replica.step()
        progress(len(replica.ended), len(trace))
    ends_s = [request.end_s for request in replica.ended if request.reason is FinishReason.LENGTH]
    if not ends_s:
        return 0.0
    first, last = len(ends_s) // 4, (3 * len(ends_s)) // 4
    if ends_s[last] > ends_s[first]:
        return (last - first) / (ends_s[last] - ends_s[first])
    return len(ends_s) / ends_s[-1]
