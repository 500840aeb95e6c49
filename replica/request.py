"""What a client asked of a replica, and what it gets back. Plain data that crosses process borders by pickle.

A *request* is what the client asked; a *sequence* is one of its `n` answers, with a token state of its own in the
replica. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from replica.errors import ErrorInfo


class FinishReason(StrEnum):
    """Why a sequence ended. Every sequence ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end.

    `temperature` 0 (or below 1e-5) is greedy; `top_k` 0 is off; `top_p` 1 is off. Token i of a sequence depends on
    `seed`, the sequence's index and i alone, never on neighbours or on how often the sequence was preempted: the
    draw is a hash of the three. `seed` None: the engine picks one, and nobody else can continue the request; the
    ingress therefore always names one. `stop` strings are matched in text, outside the engine; `stop_token_ids` inside
    it. Neither these nor an EOS end a sequence within its first `min_tokens` tokens; the token after them is the first
    that may. `ignore_eos` ignores every EOS of the model, but no stop that the request itself names.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request as a replica takes it: already tokenized and checked against the model's limits.

    Its sequences have the indexes `first_index` to `first_index + n - 1`, in their seeds and in their events.
    `prior_output_ids` are tokens that another replica already made for it (a stream continued after a failure): they
    are context here, count towards `max_tokens`, shift the sampler by their number and are never sent again. Only
    with n = 1; `first_index` then says which of the client's n is continued. `cache_salt` separates prefix-cache
    entries of tenants. `priority`: lower is more important. `lease` names the ingress process that must renew this
    stream. `session`: what the client says belongs together ("": nothing), for whoever chooses a replica.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    first_index: int = 0
    priority: int = 0
    prior_output_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    lease: str | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one sequence: `text` is what `token_ids` add to what was sent before (may lag behind the ids, never
    ahead).

    `index` is the sequence's place among the client's n. The last event of a sequence has `finish_reason`;
    `stop_reason` is the stop string or token id that matched, None for EOS. `error` is set for `error`, `rejected`,
    `timeout`. `num_output_tokens` counts all tokens generated so far, those that stop handling withholds from the
    text included.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a request's stream: coalesced events, and with the first of them the replica's newest load.

    The first message has no events: it says that the request was taken (or carries its refusal). The second one has
    the first events; later ones came as `StreamNews` in a `NewsBatch`. `num_cached_tokens` is how much of the prompt
    came from the prefix cache, known with the first token.
    """

    replica_id: str
    events: tuple[TokenEvent, ...] = ()
    load: LoadReport | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamNews:
    """What became of one open request since its last news."""

    request_id: str
    events: tuple[TokenEvent, ...]
    num_cached_tokens: int = 0


MAX_BATCHES = 16
"""Of one poll: it has become cheap then, and what a reader that suddenly falls behind has asked for is still little."""


@dataclass(frozen=True, slots=True)
class NewsBatch:
    """A part of the answer to a poll: news of all streams of a lease, and the replica's newest load once.

    The next poll acknowledges the `number` of the last one that arrived, and is given again what came after it. Numbers
    grow and are never used twice by a replica; 0 is an answer without news, which isn't acknowledged.
    """

    replica_id: str
    number: int = 0
    news: tuple[StreamNews, ...] = ()
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How loaded a replica is. Made by the replica at the end of a step, ordered by (`epoch`, `number`).

    `epoch` names one life of the replica (a restart has another), `number` grows by one a report, `made_at_s` is
    the replica's monotonic clock. Blocks: total = free + cached + held; cached ones are free to take but still hold
    a prefix. Rates are measured by the engine over its last steps (0 = not known yet). `block_hashes_*`: what the
    prefix cache gained and lost since the last report to the same lease; `block_hashes_number` orders such batches of
    changes, later ones have higher numbers (0: no changes). It is apart from `number` because answers of one step
    share a report, but only one of them carries the changes.
    `num_waiting*` count the preempted too; `num_preempted*` are those, whom the queue's bounds leave out.
    """

    replica_id: str
    epoch: str
    number: int
    made_at_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_prefill_tokens: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_cached: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    draining: bool = False
    block_hashes_added: tuple[bytes, ...] = field(default=())
    block_hashes_evicted: tuple[bytes, ...] = field(default=())
    block_hashes_number: int = 0
    num_preempted: int = 0
    num_preempted_tokens: int = 0

    @property
    def kv_usage_ratio(self) -> float:
        """Share of blocks held by sequences, 0 to 1."""
        held = self.num_blocks_total - self.num_blocks_free - self.num_blocks_cached
        return held / self.num_blocks_total if self.num_blocks_total else 0.0
