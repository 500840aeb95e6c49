"""What one waiting request weighs in a scheduler, beside its tokens."""

from __future__ import annotations

import tracemalloc

from bench.scheduler_speed.own_scheduler import NOW_S, build
from bench.scheduler_speed.workload import Workload
from replica.request import GenerationRequest, SamplingParams


def bytes_per_waiting_request(num_waiting: int) -> float:
    """Bytes that one request adds to the process while it waits, beside the tuple of its prompt's token ids: the
    request itself, the scheduler's sequence, their entries in queues and tables, and any copy of the tokens.

    Traced allocations, not resident memory, which also has what the allocator keeps. Those of all threads, so that no
    other may run meanwhile.
    """
    workload = Workload(1, num_waiting)
    scheduler = build(workload)
    prompts = [tuple(workload.prompt_ids(number)) for number in range(num_waiting)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=workload.max_tokens(number), ignore_eos=True)
            scheduler.add(number, GenerationRequest(str(number), prompt, sampling), 0, number, NOW_S)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scheduler.num_waiting == num_waiting
    return (after - before) / num_waiting
