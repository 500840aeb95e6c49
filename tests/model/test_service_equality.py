"""The main promise through the whole replica: engine in its own process, shipped settings, text out.

`test_generate_equality.py` varies the schedule and drives scheduler and runner itself. Here only the number of threads
is set, so that a busy machine doesn't lose its time at barriers.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from replica.config import EngineConfig, ModelConfig
from replica.engine_worker import load_model
from replica.request import FinishReason, GenerationRequest
from replica.service import ReplicaService
from tests.fake_replica import Answered, answer, assert_quiet, running, sample, settled
from tests.model.embedded import chat_prompts, embedded_card
from tests.model.generation import count_near_ties, greedy, reference_answers

_NUM_TOKENS = 32

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _prompts() -> list[tuple[int, ...]]:
    """Three questions, and two long chats of which one begins as the other: they need chunks, and share blocks."""
    questions = chat_prompts()
    all_in_one = sum(questions, ())
    return [questions[0], questions[7], questions[14], all_in_one, sum(questions[:10], ())]


async def _ask(service: ReplicaService, name: str) -> list[Answered]:
    """All prompts at once."""
    requests = [GenerationRequest(f"{name}-{i}", ids, greedy(_NUM_TOKENS)) for i, ids in enumerate(_prompts())]
    return list(await asyncio.gather(*(answer(service, request) for request in requests)))


async def test_a_replica_as_shipped_answers_as_generate_does() -> None:
    config = EngineConfig(ModelConfig(num_threads=1))
    async with running(config, load_model, in_thread=False) as service:
        assert service.status()["engine_pid"] != service.status()["pid"]
        answers = [*await _ask(service, "cold"), *await _ask(service, "warm")]
        assert {answered.end().finish_reason for answered in answers} == {FinishReason.LENGTH}
        await settled(service)
        assert_quiet(service)
        assert sample(service, "prefix_cache_hits_total") >= 2 * service.shape.block_size
        tokenizer = Tokenizer.from_str(service.bundle.tokenizer_json.decode())
    prompts = _prompts()
    assert max(len(prompt) for prompt in prompts) > config.scheduler.max_num_batched_tokens
    model = AutoModelForCausalLM.from_pretrained(embedded_card().weights_dir, dtype=torch.float32)
    expected = reference_answers(model, prompts, _NUM_TOKENS)
    num_parted = count_near_ties([answered.token_ids() for answered in answers], expected * 2)
    print(f"{len(answers)} answers of {_NUM_TOKENS} tokens, {num_parted} part from transformers at a near tie")
    for answered in answers:
        assert answered.text() == tokenizer.decode(answered.token_ids(), skip_special_tokens=True)
    assert "Paris" in answers[0].text()
