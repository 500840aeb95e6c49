"""A model without a network, behind the same contract: the next token is a hash of the whole context, as it is read
through the block table. A stale, missing or foreign KV block therefore changes the output or is caught at once.

Its "KV" is the token ids themselves. A slot that was never written, or whose block was poisoned since, can't be read.
Deterministic; O(context) a token, so for short contexts. `alone` is the oracle: what a request must give.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from replica.model.api import InFlightStep, ModelShape, OutOfDeviceMemory
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, JoinedSequence, StepPlan, StepResult


@dataclass(slots=True)
class FakeStep:
    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass(slots=True)
class FakeModel:
    """`eos_ratio`: how often a token is EOS. Faults: a chunk with `poison_token` makes the step raise, a context with
    `nan_token` has non-finite logits (which show only where a row samples), every `oom_every`-th step runs out of
    memory. `late`: faults show in `result`, not in `submit`. `is_async`: what it says of itself, although a step is
    done on return: a device that is very fast (`late.py` has the slow one). `samples`: what each lane sampled, by the
    number of the draw: what `PENDING_TOKEN` stands for."""

    shape: ModelShape
    eos_ratio: float = 0.0
    poison_token: int | None = None
    nan_token: int | None = None
    oom_every: int = 0
    late: bool = False
    is_async: bool = False
    num_submitted: int = 0
    closed: bool = False
    samples: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _slots: list[list[int | None]] = field(init=False)
    _lanes: dict[int, JoinedSequence] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = [[None] * self.shape.block_size for _ in range(self.shape.num_blocks)]

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.num_submitted += 1
        try:
            if self.oom_every and self.num_submitted % self.oom_every == 0:
                raise OutOfDeviceMemory("the fake model was told to run out of memory")
            return FakeStep(self._run(plan))
        except Exception as error:
            if not self.late:
                raise
            return FakeStep(error)

    def poison(self, blocks: Sequence[int]) -> None:
        """The content of these blocks means nothing any more (`BlockPool.on_poison`)."""
        for block in blocks:
            self._slots[block] = [None] * self.shape.block_size

    def close(self) -> None:
        self.closed = True

    def alone(self, request: GenerationRequest, seed: int) -> tuple[list[int], FinishReason]:
        """The tokens that one sequence of the request must give on this replica, and why it ends."""
        context, sampling, shape = [*request.prompt_ids, *request.prior_output_ids], request.sampling, self.shape
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else shape.eos_token_ids)}
        output = list(request.prior_output_ids)
        while True:
            token = self.next_token(context, sampling, seed, len(output))
            context.append(token)
            output.append(token)
            made = output[len(request.prior_output_ids) :]
            if token in stops and len(output) > sampling.min_tokens:
                return made, FinishReason.STOP
            full = len(context) in (shape.max_model_len, shape.num_blocks * shape.block_size + 1)
            if full or len(output) == sampling.max_tokens:
                return made, FinishReason.LENGTH

    def next_token(self, context: Sequence[int], sampling: SamplingParams, seed: int, output_index: int) -> int:
        """Draw number `output_index` after this context; stops are masked below `min_tokens`."""
        masked = output_index < sampling.min_tokens
        banned = {*self.shape.eos_token_ids, *sampling.stop_token_ids} if masked else set()
        key = struct.pack(f"<{len(context) + 1}q", seed if sampling.temperature >= 1e-5 else 0, *context)
        for attempt in range(1000):
            digest = blake2b(key + bytes([attempt % 256, attempt // 256]), digest_size=16).digest()
            draw, is_eos = struct.unpack("<QQ", digest)
            token = int(draw % self.shape.vocab_size)
            if self.shape.eos_token_ids and is_eos < self.eos_ratio * 2**64:
                token = self.shape.eos_token_ids[0]
            if token not in banned:
                return token
        raise ValueError("every token is banned")

    def _run(self, plan: StepPlan) -> StepResult:
        token_ids = self._known_tokens(plan)
        if self.poison_token is not None and self.poison_token in token_ids:
            raise RuntimeError("the fake model was told to raise on this token")
        for lane in plan.left:
            self._lanes.pop(lane, None)
        for joined in plan.joined:
            self._lanes[joined.lane] = joined
        tokens, failed, offset = [], {}, 0
        for row, num_tokens in enumerate(plan.num_tokens):
            chunk = token_ids[offset : offset + num_tokens]
            offset += num_tokens
            context = self._write_and_read(plan, row, chunk)
            if plan.samples[row] and self.nan_token in context:
                failed[row] = "non_finite_logits"
            tokens.append(self._sample(plan, row, context) if plan.samples[row] else PENDING_TOKEN)
        self.samples.update(zip(zip(plan.lanes, plan.output_index, strict=True), tokens, strict=True))
        return StepResult(plan.step, tokens, failed)

    def _known_tokens(self, plan: StepPlan) -> list[int]:
        """The plan's tokens, with those filled in that the step before sampled."""
        token_ids, end = plan.token_ids.copy(), 0
        for row, num_tokens in enumerate(plan.num_tokens):
            end += num_tokens
            if token_ids[end - 1] == PENDING_TOKEN:
                token_ids[end - 1] = self.samples[plan.lanes[row], plan.output_index[row] - 1]
        return token_ids

    def _write_and_read(self, plan: StepPlan, row: int, chunk: list[int]) -> list[int]:
        table, start, size = plan.block_tables[row], plan.starts[row], self.shape.block_size
        for position, token in enumerate(chunk, start):
            self._slots[table[position // size]][position % size] = token
        context = [self._slots[table[p // size]][p % size] for p in range(start + len(chunk))]
        read = [token for token in context if token is not None]
        assert len(read) == len(context), f"row {row} reads a slot that was never written"
        return read

    def _sample(self, plan: StepPlan, row: int, context: list[int]) -> int:
        joined = self._lanes[plan.lanes[row]]
        assert joined.seq_id == plan.seq_ids[row], f"row {row} uses a lane of sequence {joined.seq_id}"
        return self.next_token(context, joined.sampling, joined.seed, plan.output_index[row])
