"""The model runner: one ragged forward a step, for all prefill chunks and decodes together.

A step, from plan to tokens:
1. lanes: joining sequences leave their sampling parameters there;
2. inputs: the plan's columns become tensors; a token still pending is taken from its lane's last sample;
3. forward: all rows' tokens as one sequence `[1, T]` with their own positions; attention, which alone must know
   where one sequence ends, goes through the backend into the KV cache; logits only where the plan asks for them;
4. sampler: tokens, kept by lane for the next plan, and which rows' logits were not finite.
Nothing is committed anywhere: the same plan run again writes the same KV and draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import NonFiniteLogits, ResourceError
from replica.model import warmup
from replica.model.api import ModelShape, OutOfDeviceMemory, Progress
from replica.model.attention.backend import AttentionBackend, choose_backend, make_backend
from replica.model.attention.interface import attention_step
from replica.model.fused_layer import fuse_layers
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache, cpu_kv_bytes, model_len_that_fits, pool_size, require_cpu_memory
from replica.model.lane_tokens import LaneTokens
from replica.model.linear import pack_linears
from replica.model.sampler import Sampler, next_token_logprobs
from replica.model.shard_group import ALONE, ShardGroup
from replica.model.support import LayerShape, Probe, pin_rope, self_test
from replica.model.tiles import require_dense_layers, require_invariance, tile_plans
from replica.model.weights import choose_device, load_weights
from replica.model_card import ModelCard
from replica.scheduler.plan import PENDING_TOKEN, StepPlan, StepResult

_NUM_TOP_LOGPROBS = 20


def load_runner(
    card: ModelCard,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    progress: Progress,
    group: ShardGroup = ALONE,
) -> Runner:
    """Load a prepared model, test it, size its KV cache and warm it up. In a `group` all processes do so in lockstep.

    Raises a `StartupError` that says what to change: files that can't be read, a model that would answer wrongly, a
    pool or context that doesn't fit.
    """
    if config.tensor_parallel_size != group.size:
        raise ValueError(f"{config.tensor_parallel_size} shards can't be held by {group.size} processes")
    device = group.device or choose_device(config.device)
    if device.type == "cpu" and config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    progress(f"loading the weights of {card.name} on {device}")
    model = load_weights(card, config, device, group.size)
    progress("testing the model under paged attention")
    layers = self_test(model)
    if config.batch_invariant:
        require_dense_layers(model)
    backend = make_backend(choose_backend(device=device, dtype=model.dtype, batch_invariant=config.batch_invariant))
    with _startup_memory_errors(device):
        shape = _fitting_shape(model, layers, backend, card, config, scheduler, progress, group)
        pin_rope(model, shape.max_model_len)
        with torch.inference_mode():
            expected = warmup.dense_check(model, shape)
            if device.type == "cpu" and group.size == 1:
                progress("packing the weights")
                fuse_layers(model, layers, Probe(card.vocab_size, device))
                pack_linears(model)
        progress(
            f"allocating {shape.num_blocks} KV blocks of {shape.block_size} tokens; "
            f"contexts up to {shape.max_model_len} tokens"
        )
        runner = _build(model, layers, backend, shape, config, scheduler, group)
        progress("warming up")
        with torch.inference_mode():
            warmup.check_through_pool(runner, expected, model.config.model_type)
            if config.batch_invariant:
                require_invariance(card.name, runner.logits, card.vocab_size, runner.shape.num_blocks)
            runner.submit(warmup.peak_plan(runner.shape, scheduler)).result()
    return runner


def _build(
    model: PreTrainedModel,
    layers: list[LayerShape],
    backend: AttentionBackend,
    shape: ModelShape,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    group: ShardGroup,
) -> Runner:
    # One block more than the scheduler knows of: what pads a tile is written there.
    num_blocks = shape.num_blocks + (1 if config.batch_invariant else 0)
    cache = KVCache(layers, num_blocks, shape.block_size, model.dtype, next(model.parameters()).device)
    return Runner(
        model, cache, backend, shape, scheduler.max_num_seqs, batch_invariant=config.batch_invariant, group=group
    )


def _fitting_shape(
    model: PreTrainedModel,
    layers: list[LayerShape],
    backend: AttentionBackend,
    card: ModelCard,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    progress: Progress,
    group: ShardGroup,
) -> ModelShape:
    """Size the pool and the longest context by what the device can spare."""
    device = next(model.parameters()).device
    block_size = config.block_size or backend.block_size
    shape = ModelShape(
        num_blocks=-(-scheduler.max_num_batched_tokens // block_size) + scheduler.max_num_seqs,
        block_size=block_size,
        vocab_size=card.vocab_size,
        max_model_len=config.max_model_len or card.max_position,
        eos_token_ids=card.eos_token_ids,
    )

    if device.type == "cuda":
        progress("measuring the memory of the largest step")
        free = warmup.spare_cuda_bytes(
            lambda: _build(model, layers, backend, shape, config, scheduler, group),
            scheduler,
            config.gpu_memory_utilization,
        )
    else:
        free = cpu_kv_bytes() // group.size
    pool = pool_size(config, layers, block_size, model.dtype, group.least(free))
    if device.type == "cpu":
        require_cpu_memory(pool.num_blocks * block_size * pool.kv_bytes_per_token * group.size)
    max_model_len = model_len_that_fits(config.max_model_len, card.max_position, pool, block_size)
    return replace(
        shape,
        num_blocks=pool.num_blocks,
        max_model_len=max_model_len,
        kv_bytes_per_token=pool.kv_bytes_per_token,
    )


class Runner:
    """`ModelRunner` over a `transformers` model. Use it from one thread. Built by `load_runner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        backend: AttentionBackend,
        shape: ModelShape,
        num_lanes: int,
        *,
        batch_invariant: bool = False,
        group: ShardGroup = ALONE,
    ) -> None:
        self._batch_invariant = batch_invariant
        self._model: PreTrainedModel | None = model
        self._cache = cache
        self._backend = backend
        self._shape = shape
        self._device = next(model.parameters()).device
        self._sampler = group.shared(Sampler(num_lanes, shape.vocab_size, shape.eos_token_ids))
        self._lane_tokens = LaneTokens(num_lanes, self._device)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def is_async(self) -> bool:
        return self._device.type == "cuda"

    @property
    def is_async(self) -> bool:
        return self._device.type == "cuda"

    def submit(self, plan: StepPlan) -> InFlight:
        """Start the step; on the CPU it is done on return."""
        for joined in plan.joined:
            self._sampler.join(joined)
        with _device_errors(), torch.inference_mode():
            logits = self.logits(plan)
            return InFlight(plan, *self._sample(plan, logits), logits)

    def logits(self, plan: StepPlan) -> Tensor:
        """Run the forward and return float32 logits [sum of num_logits, V], rows in plan order."""
        if not self._batch_invariant:
            return self._forward(plan)
        return torch.cat([self._forward(tile) for tile in tile_plans(plan, self._shape.num_blocks)])

    def _forward(self, plan: StepPlan) -> Tensor:
        if self._model is None:
            raise RuntimeError("the runner is closed")
        inputs = build_inputs(plan, self._cache.block_size, self._device)
        if inputs.pending.numel():
            pending = self._lane_tokens.find(inputs.pending_lanes, inputs.pending_draws)
            inputs.token_ids[inputs.pending] = pending
        wanted = keep = inputs.logits_rows
        if self._batch_invariant and wanted.numel():
            keep = torch.arange(len(plan.token_ids), device=self._device)
        step = self._backend.prepare(inputs.layout, self._cache)
        with attention_step(step):
            output: Any = self._model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        logits: Tensor = output.logits[0].float()
        return logits if keep is wanted else logits[wanted]

    def _sample(self, plan: StepPlan, logits: Tensor) -> tuple[list[int], Tensor, Tensor]:
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        if not rows:
            nothing = torch.empty(0, dtype=torch.int64)
            return rows, nothing, nothing.bool()
        last = np.cumsum(plan.num_logits)[rows] - 1
        chosen = logits if len(rows) == len(logits) else logits[torch.from_numpy(last).to(self._device)]
        tokens, sound = self._sampler.sample(chosen, plan, rows)
        numbers = [plan.output_index[row] for row in rows]
        self._lane_tokens.keep([plan.lanes[row] for row in rows], numbers, tokens)
        return rows, tokens, sound

    def close(self) -> None:
        """Give weights and KV cache back."""
        self._model = None
        self._cache.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class InFlight:
    """A step whose tokens may still be on the device."""

    def __init__(self, plan: StepPlan, rows: list[int], tokens: Tensor, sound: Tensor, logits: Tensor) -> None:
        self._plan = plan
        self._rows = rows
        self._tokens = tokens
        self._sound = sound
        # Kept only where log-probabilities are due: logits of a step are large.
        self._logits = logits if any(count > 1 for count in plan.num_logits) else None

    def result(self) -> StepResult:
        """Waits for the device."""
        plan = self._plan
        with _device_errors():
            tokens, sound = self._tokens.tolist(), self._sound.tolist()
        token_ids = [PENDING_TOKEN] * len(plan)
        failed: dict[int, str] = {}
        for row, token, is_sound in zip(self._rows, tokens, sound, strict=True):
            token_ids[row] = token
            if not is_sound:
                failed[row] = NonFiniteLogits.code
        return StepResult(plan.step, token_ids, failed, self._logprobs(token_ids))

    def _logprobs(self, token_ids: list[int]) -> dict[int, list[tuple[float, list[tuple[int, float]]]]]:
        """For rows that asked for more than their last position."""
        if self._logits is None:
            return {}
        plan = self._plan
        ends, logits_ends = np.cumsum(plan.num_tokens), np.cumsum(plan.num_logits)
        found = {}
        for row, count in enumerate(plan.num_logits):
            if count > 1:
                known: list[int | None] = list(plan.token_ids[ends[row] - count + 1 : ends[row]])
                known.append(token_ids[row] if plan.samples[row] else None)
                logits = self._logits[logits_ends[row] - count : logits_ends[row]]
                found[row] = next_token_logprobs(logits, known, _NUM_TOP_LOGPROBS)
        return found


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfDeviceMemory(str(error).splitlines()[0] if str(error) else "out of memory") from error


@contextmanager
def _startup_memory_errors(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, OutOfDeviceMemory, MemoryError) as error:
        raise ResourceError(
            f"the memory of {device} is too small: "
            "lower --max-num-batched-tokens, --gpu-memory-utilization or --num-blocks"
        ) from error
