"""What is refused at the door, and how a request becomes a waiting sequence."""

from __future__ import annotations

from collections.abc import Sequence as Columns

from replica.errors import InvalidRequest, PromptTooLong, QueueFull
from replica.request import GenerationRequest
from replica.scheduler.sequence import Sequence
from replica.scheduler.state import SchedulerState

_MAX_PRIORITY = 2**31


def check_request(state: SchedulerState, request: GenerationRequest) -> None:
    """Raises InvalidRequest or PromptTooLong for what could never be served, whatever else is here."""
    shape, sampling, priors = state.shape, request.sampling, request.prior_output_ids
    num_input = len(request.prompt_ids) + len(priors)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if sampling.max_tokens <= len(priors):
        message = f"max_tokens = {sampling.max_tokens} leaves nothing to do after {len(priors)} tokens"
        raise InvalidRequest(message, param="max_tokens")
    if abs(request.priority) > _MAX_PRIORITY:
        raise InvalidRequest("priority is outside -2^31 to 2^31", param="priority")
    largest = min(shape.max_model_len, shape.num_blocks * shape.block_size) - 1
    if num_input > largest:
        raise PromptTooLong(f"the input has {num_input} tokens, at most {largest} fit", param="prompt")
    for token_ids in filter(None, (request.prompt_ids, priors)):
        _check_vocabulary(token_ids, shape.vocab_size)


def _check_vocabulary(token_ids: Columns[int], size: int) -> None:
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < size:
            message = f"token id {token} is outside the vocabulary, from 0 to {size - 1}"
            raise InvalidRequest(message, param="prompt")


def check_queue(state: SchedulerState, request: GenerationRequest, now_s: float) -> None:
    """Raises QueueFull unless all n sequences may wait. An empty queue takes any request. Who would come in now would
    wait about as long as the oldest has: that is when to try again."""
    waiting, config = state.waiting, state.config
    if not waiting.fresh:
        return
    num_tokens = request.n * (len(request.prompt_ids) + len(request.prior_output_ids))
    limit = ""
    if len(waiting.fresh) + request.n > config.max_num_queued_seqs:
        limit = f"{len(waiting.fresh)} sequences wait, at most {config.max_num_queued_seqs} may"
    elif waiting.num_fresh_tokens + num_tokens > config.max_num_queued_tokens:
        limit = f"{waiting.num_fresh_tokens} tokens wait, at most {config.max_num_queued_tokens} may"
    if limit:
        retry_after_s = min(max(1.0, waiting.oldest_wait_s(now_s)), config.queue_timeout_s)
        raise QueueFull(f"the waiting queue is full: {limit}", retry_after_s=retry_after_s)


def make_sequence(
    state: SchedulerState, seq_id: int, request: GenerationRequest, index: int, seed: int, now_s: float
) -> Sequence:
    """A sequence that fits: at most as long as the model and the pool allow."""
    shape, config = state.shape, state.config
    arrival = state.num_arrivals
    state.num_arrivals += 1
    max_len = min(len(request.prompt_ids) + request.sampling.max_tokens, shape.max_seq_len)
    aged = request.priority * config.priority_ageing_s + now_s
    return Sequence(
        seq_id,
        request,
        index,
        seed,
        arrival=arrival,
        queue_key=(aged if config.policy == "priority" else float(arrival), arrival),
        max_len=max_len,
        is_small=state.tables.blocks_for(max_len) <= config.kv_bypass_blocks,
        eos_token_ids=shape.eos_token_ids,
        now_s=now_s,
    )
