"""Our side: `replica.scheduler` in this process, driven as the engine drives it."""

from __future__ import annotations

from dataclasses import replace
from time import thread_time

from bench.scheduler_speed.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    VOCAB_SIZE,
    StepTimes,
    Workload,
    mean_us,
    settle_memory,
    unsettle_memory,
)
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import GenerationRequest, SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult
from replica.scheduler.scheduler import Scheduler
from replica.stats import StepStats

NOW_S = 0.0
"""Time stands still: nobody waits too long."""

_FREE_PLACES = 16
_NO_ROOM = 0.99
"""A watermark by which the pool is too small for all who come while somebody runs, however many steps are timed."""
_SMALL_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE // 8


class OwnScheduler:
    """A `Side`."""

    def __init__(self) -> None:
        self._scheduler: Scheduler
        self._workload: Workload

    def start(self, workload: Workload) -> None:
        unsettle_memory()
        self._workload = workload
        self._scheduler = build(workload)
        watermark = self._scheduler.config.watermark
        self._scheduler.set_budgets(watermark=0.0)
        for number in range(workload.num_running):
            add(self._scheduler, workload, number)
        while True:
            plan = self._plan()
            self._scheduler.commit(plan, StepResult(plan.step, _prefill_tokens(plan)), NOW_S)
            if plan.num_decode_tokens == workload.num_running:
                break
        self._scheduler.set_budgets(watermark=watermark)
        for number in range(workload.num_running, workload.num_requests):
            add(self._scheduler, workload, number)
        settle_memory()

    def run_round(self, num_steps: int) -> StepTimes:
        scheduler = self._scheduler
        planned, committed, reported = [], [], []
        for step in range(num_steps):
            tokens = self._workload.sampled_ids(step)
            began = thread_time()
            scheduler.expire(NOW_S)
            plan = self._plan()
            planned.append(thread_time() - began)
            result = StepResult(plan.step, tokens)
            began = thread_time()
            scheduler.commit(plan, result, NOW_S)
            committed.append(thread_time() - began)
            began = thread_time()
            stats = scheduler.stats(plan, NOW_S, step_s=0.0, idle_s=0.0)
            scheduler.load()
            reported.append(thread_time() - began)
            self._require(stats)
        return StepTimes(mean_us(planned), mean_us(committed), mean_us(reported))

    def _require(self, stats: StepStats) -> None:
        """The step was the one that is to be timed."""
        work, waiting = self._workload, stats.num_waiting_by_reason
        if stats.num_decode_tokens != work.num_running or waiting[work.blocked_by] != work.num_waiting:
            raise RuntimeError(f"{stats.num_decode_tokens} decodes, and who waits does so for {waiting}")

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan(NOW_S)
        if plan is None:
            raise RuntimeError("nothing to plan: the workload has ended")
        return plan


def build(workload: Workload) -> Scheduler:
    """A scheduler for this workload: whose places its running sequences fill, or one with free places and no room."""
    config = SchedulerConfig(
        max_num_seqs=workload.num_running,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=True,
        max_num_queued_seqs=max(1, workload.num_requests),
        max_num_queued_tokens=MAX_MODEL_LEN * max(1, workload.num_requests),
    )
    if workload.blocked_by == "blocks":
        places = workload.num_running + _FREE_PLACES
        config = replace(config, max_num_seqs=places, watermark=_NO_ROOM, kv_bypass_blocks=_SMALL_BLOCKS)
    return Scheduler(
        config,
        ModelShape(
            num_blocks=workload.num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(2,),
        ),
    )


def add(scheduler: Scheduler, workload: Workload, number: int) -> None:
    """Queue request `number` of the workload."""
    sampling = SamplingParams(max_tokens=workload.max_tokens(number), ignore_eos=True)
    request = GenerationRequest(str(number), tuple(workload.prompt_ids(number)), sampling)
    scheduler.add(number, request, 0, number, NOW_S)


def _prefill_tokens(plan: StepPlan) -> list[int]:
    return [row % VOCAB_SIZE if samples else PENDING_TOKEN for row, samples in enumerate(plan.samples)]
