"""How long one decision takes: the real `RouterState`, with news between any two decisions, as there is when it serves.

Only `choose` is timed. Before each decision one report comes and one request is taken and one ends, so that a decision
has something to look at again. All replicas are warm. Every prompt has `NUM_BLOCKS` blocks, which some replicas hold.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np

from replica.request import LoadReport
from router.config import RouterConfig
from router.state import RouterState
from router.types import RouteRequest

NUM_BLOCKS = 32
NUM_PREFIXES = 50
OPEN_PER_REPLICA = 2
WARM_UP = 200


class DecisionSpeed(NamedTuple):
    """Microseconds."""

    num_replicas: int
    mean_us: float
    p50_us: float
    p99_us: float


def time_decisions(
    num_replicas: int, num_decisions: int, config: RouterConfig, clock: Callable[[], float]
) -> DecisionSpeed:
    """`clock`: seconds, as precise as there is."""
    rng = Random(0)
    names = [f"replica-{i}" for i in range(num_replicas)]
    state = RouterState(replace(config, ramp_s=0.0), rng=Random(1))
    state.retain(names)
    chains = [tuple(rng.randbytes(32) for _ in range(NUM_BLOCKS)) for _ in range(NUM_PREFIXES)]
    for name in names:
        state.observe(_report(rng, name, 1))
    opened: deque[tuple[str, str]] = deque()
    took_s = []
    gc.disable()
    try:
        for number in range(num_decisions + WARM_UP):
            request = RouteRequest(str(number), NUM_BLOCKS * 16 + 8, 128, 1, rng.choice(chains))
            began_s = clock()
            winner = state.choose(request, names).replica_id
            took_s.append(clock() - began_s)
            opened.append((request.request_id, winner))
            state.accepted(request.request_id, winner)
            state.observe(_report(rng, rng.choice(names), number + 2))
            if len(opened) > OPEN_PER_REPLICA * num_replicas:
                state.ended(opened.popleft()[0])
    finally:
        gc.enable()
    us = np.array(took_s[WARM_UP:]) * 1e6
    return DecisionSpeed(num_replicas, float(us.mean()), *(float(q) for q in np.percentile(us, (50, 99))))


def _report(rng: Random, name: str, number: int) -> LoadReport:
    num_running, num_waiting = rng.randrange(40), rng.randrange(4)
    return LoadReport(
        replica_id=name,
        epoch="1",
        number=number,
        made_at_s=0.0,
        num_running=num_running,
        num_waiting=num_waiting,
        num_waiting_tokens=500 * num_waiting,
        num_prefill_tokens=rng.randrange(500),
        num_blocks_total=3000,
        num_blocks_free=2500 - 50 * num_running,
        num_blocks_cached=400,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        prefill_tokens_per_s=5000.0 + rng.randrange(1000),
        decode_tokens_per_s=1500.0 + rng.randrange(300),
    )
