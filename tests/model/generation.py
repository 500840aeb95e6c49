"""Drives the real scheduler and a runner over some requests, and holds the tokens against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from replica.config import SchedulerConfig
from replica.model.api import ModelRunner, ModelShape
from replica.request import GenerationRequest, SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, StepOutcome, StepPlan
from replica.scheduler.scheduler import Scheduler

# Law 8: tokens may first differ only where the two best logits are closer than this.
MAX_GAP = 1e-3


@dataclass(slots=True)
class Run:
    """What a run made: tokens by request, and what it did on the way."""

    tokens: list[list[int]]
    num_preemptions: int = 0
    num_cached_tokens: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def scheduler_for(
    shape: ModelShape, *, num_blocks: int | None = None, max_num_seqs: int = 8, budget: int = 512
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, replace(shape, num_blocks=num_blocks or shape.num_blocks), check_invariants=True)


def generate(
    runner: ModelRunner,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    overlap: bool = False,
    seeds: Sequence[int] | None = None,
) -> Run:
    """All prompts at once. `overlap`: every plan is made before its predecessor's commit, as the engine does."""
    run = Run(tokens=[[] for _ in prompts])
    for seq_id, prompt in enumerate(prompts):
        request = GenerationRequest(str(seq_id), tuple(prompt), sampling)
        scheduler.add(seq_id, request, 0, seeds[seq_id] if seeds else seq_id, 0.0)
    plan = scheduler.plan(0.0)
    while plan is not None:
        run.plans.append(plan)
        step = runner.submit(plan)
        ahead = scheduler.plan(0.0) if overlap else None
        result = step.result()
        assert result.failed_rows == {}
        _take(run, scheduler.commit(plan, result, 0.0))
        plan = ahead or scheduler.plan(0.0)
    assert not scheduler.has_work
    for seq_id in range(len(prompts)):
        timings = scheduler.timings(seq_id)
        run.num_preemptions += timings.num_preemptions
        run.num_cached_tokens.append(timings.num_cached_tokens)
        scheduler.forget(seq_id)
    return run


def _take(run: Run, outcome: StepOutcome) -> None:
    for seq_id, token in zip(outcome.seq_ids, outcome.token_ids, strict=True):
        if token != PENDING_TOKEN:
            run.tokens[seq_id].append(token)


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' greedy answer to a prompt: its tokens, and the gap of the two best logits at each."""

    tokens: list[int]
    gaps: list[float]


def reference_answers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reference]:
    """One prompt after the other through `generate`, EOS ignored."""
    answers = []
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(  # type: ignore[operator]
                input_ids=torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(output.logits)[:, 0].float().topk(2).values
        tokens = output.sequences[0, len(prompt) :].tolist()
        answers.append(Reference(tokens, (best[:, 0] - best[:, 1]).tolist()))
    return answers


def count_near_ties(found: Sequence[Sequence[int]], expected: Sequence[Reference]) -> int:
    """How many answers part from the reference at a near tie; fails when one parts anywhere else."""
    num_parted = 0
    for index, (tokens, reference) in enumerate(zip(found, expected, strict=True)):
        assert len(tokens) == len(reference.tokens), f"answer {index} has {len(tokens)} tokens"
        for place, (token, wanted) in enumerate(zip(tokens, reference.tokens, strict=True)):
            if token != wanted:
                gap = reference.gaps[place]
                assert gap < MAX_GAP, f"answer {index} has {token} for {wanted} at {place}, where the gap is {gap:.4f}"
                num_parted += 1
                break
    return num_parted
