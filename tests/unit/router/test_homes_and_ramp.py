"""Where prompts go that nobody holds, and how replicas that come later get their share."""

from __future__ import annotations

import random

from router.config import RouterConfig
from router.state import RouterState
from tests.unit.router.loads import Clock, report, request


def test_a_prompt_that_nobody_holds_goes_home_and_every_router_knows_where(clock: Clock) -> None:
    replica_ids = [f"replica-{i}" for i in range(8)]
    chains = [tuple(bytes([kind, i]) for i in range(8)) for kind in range(20)]

    def winners(seed: int) -> list[str]:
        found = []
        for number, chain in enumerate(chains):
            state = RouterState(clock=clock, rng=random.Random(seed))
            for replica_id in replica_ids:
                state.observe(report(replica_id, num_running=4))
            found.append(state.choose(request(f"r{number}", block_hashes=chain), replica_ids).replica_id)
        return found

    assert winners(1) == winners(2)
    assert len(set(winners(1))) > 4


def test_home_is_left_when_it_is_busier_by_more_than_the_prefill(state: RouterState) -> None:
    chain = tuple(bytes([i]) for i in range(8))
    home = state.choose(request("r", block_hashes=chain), ["a", "b", "c"]).replica_id
    other = RouterState(clock=lambda: 100.0, rng=random.Random(3))
    for replica_id in "abc":
        busy = {"num_waiting": 4, "num_waiting_tokens": 2000} if replica_id == home else {}
        other.observe(report(replica_id, **busy))
    assert other.choose(request("r", block_hashes=chain), ["a", "b", "c"]).replica_id != home


def test_a_replica_that_comes_later_gets_its_share_step_by_step(clock: Clock) -> None:
    """Beside busy replicas an idle newcomer draws everything, unless it ramps: then it begins as one of them."""

    def share(ramp_s: float, age_s: float) -> float:
        """Of first decisions."""
        num_new = 0
        for seed in range(40):
            state = RouterState(RouterConfig(ramp_s=ramp_s), clock=clock, rng=random.Random(seed))
            for replica_id in "abc":
                state.observe(report(replica_id, num_running=16))
            clock.now_s += 20.0
            state.observe(report("new"))
            clock.now_s += age_s
            for replica_id in "abc":
                state.observe(report(replica_id, number=2, num_running=16))
            state.observe(report("new", number=2))
            num_new += state.choose(request("r"), ["a", "b", "c", "new"]).replica_id == "new"
        return num_new / 40

    assert share(0.0, 0.0) == share(10.0, 10.0) == share(10.0, 5.0) == 1.0
    assert share(10.0, 0.0) < 0.5


def test_an_engine_that_began_anew_is_cold_again(clock: Clock) -> None:
    state = RouterState(RouterConfig(ramp_s=10.0), clock=clock)
    state.observe(report("a"))
    clock.now_s += 11.0
    state.choose(request("r"), ["a"])
    assert state._looked_at._cold == {}
    state.observe(report("a", epoch="life-2", number=0))
    assert state._looked_at._cold == {"a": clock.now_s}
