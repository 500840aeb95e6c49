"""Taking blocks back from a running sequence so that another can go on; the loser recomputes later."""

from __future__ import annotations

from replica.scheduler.block_pool import BlockPool
from replica.scheduler.sequence import Sequence, SequenceStatus
from replica.scheduler.state import SchedulerState, StepDraft

SPARED_AFTER = 3
"""A sequence preempted this often is spared while another victim exists."""


def make_room(state: SchedulerState, draft: StepDraft, needy: Sequence) -> bool:
    """At least one free block for `needy`, by preempting others if need be; False: not in this step.

    False when `needy` was the victim itself, or when sequences whose last token is in flight will give blocks back at
    the coming commit: waiting one step costs less than recomputing a context.
    """
    while state.tables.pool.num_free == 0:
        victim = None if state.batch.ending else choose_victim(state)
        if victim is None:
            draft.withdraw(needy)
            return False
        draft.withdraw(victim)
        draft.preempted = True
        preempt(state, victim)
        if victim is needy:
            return False
    return True


def choose_victim(state: SchedulerState) -> Sequence | None:
    """Who loses: of those who may, whom the rule picks (`newest`, unless a study brought another)."""
    candidates = may_lose(state.batch.running, state.config.policy)
    return state.victim_rule(candidates, state.tables.pool) if candidates else None


def may_lose(running: list[Sequence], policy: str) -> list[Sequence]:
    """Whom a rule may pick from, newest arrival first. Never the oldest: it always makes progress. Those preempted
    often are spared while another victim exists. Under `priority` only the least important (as aged at admission)."""
    candidates = running[:0:-1]
    unspared = [seq for seq in candidates if seq.num_preemptions < SPARED_AFTER] or candidates
    if policy == "priority" and unspared:
        least = max(seq.aged_priority for seq in unspared)
        return [seq for seq in unspared if seq.aged_priority == least]
    return unspared


def newest(candidates: list[Sequence], pool: BlockPool) -> Sequence:  # noqa: ARG001 - the signature of all rules
    """The last to arrive: it returns last, so it doesn't come back for the next to be preempted."""
    return candidates[0]


def preempt(state: SchedulerState, victim: Sequence) -> None:
    """All blocks back, nothing computed, output kept; back to its place among the waiting.

    Tokens of its that are in flight stay known: their steps will still deliver them.
    """
    state.tally.num_preemptions += 1
    victim.num_preemptions += 1
    victim.lost(victim.num_computed)
    return_to_queue(state, victim)


def return_to_queue(state: SchedulerState, seq: Sequence) -> None:
    state.batch.remove([seq])
    state.tables.release(seq)
    seq.num_computed = seq.num_scheduled = 0
    seq.num_hashed = seq.commit_due = 0
    seq.status = SequenceStatus.WAITING
    seq.waiting_since_s = state.now_s
    state.waiting.add_returned(seq)
