"""Every interleaving of arrivals, plans, commits, ends and aborts of a small world.

The search: from a state, take every action that is possible; a state whose key was met before is not gone into again.
Every law is checked on the way, in `World` and its ledger. What one path can't show is checked on the graph afterwards:

    no deadlock   a state with live sequences has a plan or a commit that leads elsewhere
    no livelock   no cycle of plans and commits; the longest run of plans without a token is bounded
    it drains     both follow, for a driver that plans and commits in any order; a state without live sequences holds
                  nothing
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest
from tests.property.scheduler.snapshot import freeze, state_key, thaw
from tests.property.scheduler.world import VOCAB, World

EOS = VOCAB
"""Never drawn by the fake model: a sequence ends where the search says so."""


@dataclass(frozen=True)
class Action:
    """`chosen`: which request arrives (by place), who is aborted (by id), which rows of a commit sample EOS."""

    verb: str
    chosen: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.verb, *map(str, self.chosen)])


@dataclass
class SmallWorld:
    """What is explored. `plans_ahead` 2: plan(n + 1) may come before commit(n). `mishaps`: how often a step in
    flight may fail or the newest be preempted for lack of device memory. `ticks`: how often time passes, `tick_s` at
    once."""

    requests: tuple[GenerationRequest, ...]
    settings: SchedulerConfig
    num_blocks: int = 6
    block_size: int = 2
    max_model_len: int = 100
    plans_ahead: int = 2
    aborts: bool = True
    mishaps: int = 0
    ticks: int = 0
    tick_s: float = 10.0

    def begin(self) -> World:
        assert self.ticks * self.tick_s < self.settings.queue_timeout_s, "nobody expires: keys don't say since when"
        shape = ModelShape(self.num_blocks, self.block_size, VOCAB, self.max_model_len, eos_token_ids=(EOS,))
        return World(self.settings, FakeModel(shape))

    def actions(self, world: World) -> Iterator[Action]:
        here = {book.request.request_id for book in world.ledger.books.values()}
        for place, request in enumerate(self.requests):
            if request.request_id not in here:
                yield Action("arrive", (place,))
        if len(world.in_flight) < self.plans_ahead:
            yield Action("plan")
        if world.in_flight:
            plan, _ = world.in_flight[0]
            rows = [r for r, s in enumerate(plan.samples) if s and world.ledger.books[plan.seq_ids[r]].end is None]
            for mask in range(1 << len(rows)):
                yield Action("commit", tuple(row for i, row in enumerate(rows) if mask >> i & 1))
        if self.aborts:
            yield from (Action("abort", (seq_id,)) for seq_id in world.ledger.live)
        if world.num_mishaps < self.mishaps:
            if world.in_flight:
                yield Action("roll_back")
            if not world.in_flight and world.scheduler.num_running > 1:
                yield Action("preempt_newest")
        if world.now_s < self.ticks * self.tick_s:
            yield Action("tick")

    def take(self, world: World, action: Action) -> None:
        match action.verb:
            case "arrive":
                assert world.add(self.requests[action.chosen[0]]) is not None, "a request that fits was refused"
            case "plan":
                world.plan()
            case "commit":
                commit_with_eos(world, action.chosen)
            case "abort":
                world.abort(action.chosen[0])
            case "roll_back":
                world.num_mishaps += 1
                world.rollback()
            case "preempt_newest":
                world.num_mishaps += 1
                world.scheduler.preempt_newest()
            case "tick":
                world.now_s += self.tick_s
                world.expire()
        world.scheduler.check_invariants()
        world.check_cached_blocks()
        for seq_id in [*world.scheduler._state.ended]:
            world.scheduler.forget(seq_id)


def commit_with_eos(world: World, rows: tuple[int, ...]) -> None:
    """The oldest step in flight comes back; these rows sampled EOS. Who should end does, and nobody else."""
    plan, step = world.in_flight.pop(0)
    result = step.result()
    tokens = [EOS if row in rows else token for row, token in enumerate(result.token_ids)]
    live = [row for row, seq_id in enumerate(plan.seq_ids) if world.ledger.books[seq_id].end is None]
    world.commit_result(plan, replace(result, token_ids=tokens))
    for row in live:
        book = world.ledger.books[plan.seq_ids[row]]
        full = len(book.received) == book.request.sampling.max_tokens
        expected = FinishReason.STOP if row in rows else FinishReason.LENGTH if full else None
        assert book.end == expected, "law 5: a sequence ended otherwise than it should"
        alone, _ = world.model.alone(book.request, 0)
        made = [*alone[: len(book.received) - 1], EOS] if row in rows else alone[: len(book.received)]
        assert book.received == made, "law 8: tokens depend on something else than the sequence"


@dataclass
class Exploration:
    """What was seen. `onward[i]`: the states that plans and commits lead to from state i, with whether a plan was made
    and whether a token came. `live[i]`: somebody hasn't ended."""

    world: SmallWorld
    num_transitions: int = 0
    longest_silence: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    live: list[bool] = field(default_factory=list)
    onward: list[list[tuple[int, bool, bool]]] = field(default_factory=list)
    came_by: list[tuple[int, Action] | None] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    @property
    def num_states(self) -> int:
        return len(self.live)

    def number_of(self, world: World, came_by: tuple[int, Action] | None) -> tuple[int, bool]:
        """The number of this state, and whether it is new."""
        key = state_key(world)
        number = self._numbers.setdefault(key, self.num_states)
        is_new = number == self.num_states
        if is_new:
            self.came_by.append(came_by)
            self.live.append(bool(world.ledger.live))
            self.onward.append([])
            check_ended(world)
            assert state_key(world) == key, "law 9: aborting those that have ended changed something"
        return number, is_new

    def path_to(self, state: int) -> str:
        actions = []
        while (step := self.came_by[state]) is not None:
            state = step[0]
            actions.append(str(step[1]))
        return ", ".join(reversed(actions)) or "the start"


@contextmanager
def rare_collections() -> Iterator[None]:
    """Thousands of worlds are made and dropped: the garbage collector looks at many of them at once."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@rare_collections()
def explore(world: SmallWorld, max_states: int = 1_000_000) -> Exploration:
    """Goes everywhere. Raises AssertionError with the way there where a law is broken, and for a world of more than
    `max_states`: what wasn't gone through whole shows nothing."""
    found = Exploration(world)
    start = world.begin()
    found.number_of(start, None)
    frontier = [(0, freeze(start), list(world.actions(start)))]
    while frontier:
        number, frozen, actions = frontier.pop()
        for action in actions:
            there = thaw(frozen)
            before = (there.ledger.num_received, there.ledger.num_preemptions)
            try:
                world.take(there, action)
                reached, is_new = found.number_of(there, (number, action))
            except Exception as error:
                raise AssertionError(f"{error or repr(error)}; after: {found.path_to(number)}, {action}") from error
            found.num_transitions += 1
            found.seen[action.verb] += 1
            found.seen["preempted"] += action.verb == "plan" and there.ledger.num_preemptions > before[1]
            if is_new:
                assert found.num_states <= max_states, f"not gone through whole: over {max_states:,} states"
                frontier.append((reached, freeze(there), list(world.actions(there))))
            if action.verb in ("plan", "commit"):
                found.onward[number].append((reached, action.verb == "plan", there.ledger.num_received > before[0]))
    check_progress(found)
    return found


def check_ended(world: World) -> None:
    """Law 9 for those that have ended; law 3 once all have."""
    for seq_id, book in world.ledger.books.items():
        assert book.end is None or not world.scheduler.abort(seq_id), "law 9: one that had ended was aborted"
    if not world.ledger.live:
        pool = world.scheduler.block_pool
        assert pool.num_held == 0, "law 3: blocks are held by nobody"
        assert not world.scheduler.has_work and world.scheduler.num_waiting == 0


def check_progress(found: Exploration) -> None:
    """Law 6 on the whole graph; `longest_silence` is the largest number of plans without a token, on any path."""
    silence: dict[int, int] = {}
    for root in range(found.num_states):
        _measure_silence(found, root, silence)
    found.longest_silence = max(silence.values())
    bound = found.world.num_blocks * found.world.block_size + 1
    assert found.longest_silence <= bound, "law 6: livelock: no sequence gains a token"


def _measure_silence(found: Exploration, root: int, silence: dict[int, int]) -> None:
    """Depth first from `root`, each state once: a state met again on its own path closes a cycle."""
    on_path: set[int] = set()
    path = [root]
    while path:
        state = path[-1]
        onward = [edge for edge in found.onward[state] if edge[0] != state]
        if state in silence:
            path.pop()
            continue
        assert onward or not found.live[state], f"law 6: deadlock after: {found.path_to(state)}"
        on_path.add(state)
        ahead = [edge[0] for edge in onward if edge[0] not in silence]
        if ahead:
            assert on_path.isdisjoint(ahead), f"law 6: livelock after: {found.path_to(state)}"
            path += ahead
            continue
        silence[state] = max((0 if gains else planned + silence[then] for then, planned, gains in onward), default=0)
        on_path.discard(state)
        path.pop()
