"""One sequence's token state: a counter (tokens whose KV exists) that chases another (tokens known).

    prompt + prior output        output of this replica        token in flight
    |------------ input_len -----|------------------------------|?|
    |---- num_computed ----|- in flight -|                           num_scheduled = both
    |---- gap = len(tokens) - num_scheduled: what is left to plan ---|

A token that a submitted step will sample is in `tokens` as `PENDING_TOKEN` until that step is committed. So the next
plan can be made before: it counts the place and doesn't need the value.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import cast

from replica.request import GenerationRequest
from replica.scheduler.block_hash import extend_chain, packed, root_hash


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()
    """Its last possible token (by length) is in flight: it keeps its blocks until that commit, but no place."""
    ENDED = auto()


class Sequence:
    """Mutable state of one sequence, owned by the scheduler. Lengths in tokens, times in seconds.

    `max_len`: prompt and output together never grow past it. `arrival` orders sequences for good. `admission` names
    one stay in the running batch, 0 outside: a row of a plan belongs to the sequence only while they agree.
    `tokens`: all known ones. Until `own_tokens` the request's own, since thousands may wait.
    Waiting: `queue_key` is its place in the policy's order, `ticket` names its one valid entry there, `parked` says
    that it waits for a long-prefill slot. `is_small`: its whole demand may pass a head that waits for KV space.
    `recomputed_until`: positions below it were computed before a preemption. `caught_up_at`: from here on positions
    are decode tokens: neither input nor recomputed.
    Between two events a decode only counts: `plan_due` is the first `num_scheduled` from which planning one more token
    does more (takes a block, or is its last); `commit_due` the first `num_computed` at which committing does (a block
    is full, the first token, the last).
    """

    __slots__ = (
        "admission",
        "aged_priority",
        "announced",
        "arrival",
        "block_table",
        "caught_up_at",
        "chunk",
        "commit_due",
        "finished_at_s",
        "first_token_at_s",
        "hashes",
        "index",
        "input_len",
        "is_small",
        "kv_blocked_since_s",
        "lane",
        "max_len",
        "num_cached_tokens",
        "num_computed",
        "num_hashed",
        "num_preemptions",
        "num_scheduled",
        "num_slots",
        "overtaken_since_s",
        "parked",
        "plan_due",
        "prompt_len",
        "queue_key",
        "queued_at_s",
        "recomputed_until",
        "request",
        "scheduled_at_s",
        "seed",
        "seq_id",
        "status",
        "stop_from",
        "stop_ids",
        "ticket",
        "tokens",
        "waiting_since_s",
    )

    def __init__(
        self,
        seq_id: int,
        request: GenerationRequest,
        index: int,
        seed: int,
        *,
        arrival: int,
        queue_key: tuple[float, int],
        max_len: int,
        is_small: bool,
        eos_token_ids: tuple[int, ...],
        now_s: float,
    ) -> None:
        sampling = request.sampling
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.seed = seed
        self.arrival = arrival
        self.queue_key = queue_key
        self.ticket = 0
        self.parked = False
        self.overtaken_since_s: float | None = None
        self.kv_blocked_since_s: float | None = None
        self.is_small = is_small
        self.aged_priority = 0.0
        priors = request.prior_output_ids
        self.tokens = cast("list[int]", request.prompt_ids + priors if priors else request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.input_len = len(self.tokens)
        self.max_len = max_len
        self.stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
        self.stop_from = self.prompt_len + sampling.min_tokens
        self.status = SequenceStatus.WAITING
        self.num_computed = self.num_scheduled = self.chunk = 0
        self.block_table: list[int] = []
        self.hashes: list[bytes] = []
        self.num_slots = self.num_hashed = 0
        self.plan_due = self.commit_due = 0
        self.lane = -1
        self.announced = False
        self.admission = 0
        self.num_preemptions = self.recomputed_until = 0
        self.caught_up_at = self.input_len
        self.num_cached_tokens = 0
        self.queued_at_s = self.waiting_since_s = now_s
        self.scheduled_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.finished_at_s: float | None = None

    @property
    def gap(self) -> int:
        """Known tokens that no plan computes yet."""
        return len(self.tokens) - self.num_scheduled

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those from elsewhere and those in flight included: the number of the next draw."""
        return len(self.tokens) - self.prompt_len

    def hash_at(self, block_index: int, block_size: int) -> bytes:
        """The chain hash of the block_index-th full block of known tokens; computed once, in order."""
        hashes = self.hashes
        if len(hashes) <= block_index:
            root = b"" if hashes else root_hash(self.request.cache_salt)
            blocks = self.tokens[len(hashes) * block_size : (block_index + 1) * block_size]
            extend_chain(hashes, root, packed(blocks), block_size)
        return hashes[block_index]

    def own_tokens(self) -> None:
        """It takes a place and will append."""
        if not isinstance(self.tokens, list):  # the type is a promise from here on
            self.tokens = list(self.tokens)  # type: ignore[unreachable]

    def hold_slots(self, num_slots: int) -> None:
        """Its block table has KV slots for that many positions."""
        self.num_slots = num_slots
        self.plan_due = min(num_slots, self.max_len - 2)

    def lost(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` is gone: computing them again counts as recomputed."""
        self.recomputed_until = max(self.recomputed_until, num_tokens)
        self.caught_up_at = max(self.input_len, self.recomputed_until)
