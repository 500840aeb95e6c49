"""Taking blocks back from a running sequence so that another can go on; the loser recomputes later."""

from __future__ import annotations

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
        victim = None if state.batch.ending else choose_victim(state.batch.running, state.config.policy)
        if victim is None:
            draft.withdraw(needy)
            return False
        draft.withdraw(victim)
        draft.preempted = True
        preempt(state, victim)
        if victim is needy:
            return False
    return True


def choose_victim(running: list[Sequence], policy: str) -> Sequence | None:
    """Who loses: `fcfs`: the newest by arrival; `priority`: the least important (as aged at admission), then the
    newest. Those preempted often are spared while another victim exists. Never the oldest: it always makes progress.
    """
    candidates = running[:0:-1]
    unspared = [seq for seq in candidates if seq.num_preemptions < SPARED_AFTER] or candidates
    if policy == "priority":
        return max(unspared, key=lambda seq: seq.aged_priority, default=None)
    return unspared[0] if unspared else None


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
