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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import ResourceError
from replica.model import warmup
from replica.model.api import ModelShape, OutOfDeviceMemory, Progress
from replica.model.attention.backend import AttentionBackend
from replica.model.attention.choice import choose_attention
from replica.model.attention.interface import AttentionStep, attention_step
from replica.model.attention.paged import PagedBackend
from replica.model.cpu_compiler import is_first_start, use_threads
from replica.model.cpu_threads import use_cpu_threads
from replica.model.fused_layer import fuse_layers
from replica.model.graphs import CudaCapture, DecodeGraphs, GraphCapture, captured
from replica.model.host_memory import is_out_of_memory
from replica.model.huge_pages import Arena
from replica.model.in_flight import InFlight, device_errors
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache
from replica.model.kv_memory import SpareMemory, cpu_spare_memory, cuda_spare_memory, fit_pool
from replica.model.lane_tokens import LaneTokens
from replica.model.linear import pack_linears, packed_bytes
from replica.model.mask_probe import require_windows_in_calls
from replica.model.sampler import Sampler
from replica.model.shard_group import ALONE, ShardGroup
from replica.model.support import LayerShape, Probe, near_and_far, pin_rope, self_test
from replica.model.tiles import require_dense_layers, require_invariance, tile_plans
from replica.model.transfers import to_device
from replica.model.weights import choose_device, load_weights, weights_fit
from replica.model_card import ModelCard
from replica.scheduler.plan import StepPlan


def load_runner(
    card: ModelCard,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    progress: Progress,
    group: ShardGroup = ALONE,
    capture: GraphCapture | None = None,
) -> Runner:
    """Load a prepared model, test it, size its KV cache and warm it up. In a `group` all processes do so in lockstep.
    `capture` records decode steps; None: the device's own way, which the CPU has none of.

    Raises a `StartupError` that says what to change: files that can't be read, a model that would answer wrongly, a
    pool or context that doesn't fit.
    """
    if config.tensor_parallel_size != group.size:
        raise ValueError(f"{config.tensor_parallel_size} shards can't be held by {group.size} processes")
    device = group.device or choose_device(config.device)
    if device.type == "cpu":
        use_cpu_threads(config.num_threads)
    elif device.index is not None:
        torch.cuda.set_device(device)  # where kernels, streams and graphs of ours go
    progress(f"loading the weights of {card.name} on {device}")
    model = load_weights(card, config, device, group.size)
    progress("testing the model under paged attention")
    with weights_fit(card.name, device):
        layers = self_test(model)
    if device.type == "cpu" and is_first_start():
        progress("compiling loops for this processor (once; half a minute)")
    if config.batch_invariant:
        require_dense_layers(model)
    backend = _backend(config, layers, model.dtype, device, progress)
    if capture is None and device.type == "cuda" and group.size == 1 and not config.enforce_eager:
        capture = CudaCapture()
    with _startup_memory_errors(device):
        record = _record if capture is not None else None
        shape = _fitting_shape(model, layers, backend, card, config, scheduler, progress, group, record)
        pin_rope(model, shape.max_model_len)
        with torch.inference_mode():
            expected = warmup.dense_check(model, shape)
            if device.type == "cpu" and group.size == 1:
                _pack(model, layers, near_and_far(card.vocab_size, device, shape.max_model_len), progress)
        progress(
            f"allocating {shape.num_blocks} KV blocks of {shape.block_size} tokens; "
            f"contexts up to {shape.max_model_len} tokens"
        )
        runner = _build(model, layers, backend, shape, config, scheduler, group)
        progress("warming up")
        with torch.inference_mode():
            warmup.check_through_pool(runner, expected, model.config.model_type)
            if config.batch_invariant:
                require_invariance(card.name, runner.logits, runner.shape)
            runner.submit(warmup.peak_plan(runner.shape, scheduler)).result()
            if capture is not None:
                runner.capture(capture, progress)
    return runner


def _pack(model: PreTrainedModel, layers: list[LayerShape], probes: list[Probe], progress: Progress) -> None:
    progress("packing the weights")
    packed = Arena()
    num_fused = fuse_layers(model, layers, probes, packed)
    progress(f"{num_fused} of {len(layers)} layers run as compiled loops")
    pack_linears(model, packed)


def _backend(
    config: ModelConfig, layers: list[LayerShape], dtype: torch.dtype, device: torch.device, progress: Progress
) -> AttentionBackend:
    return choose_attention(
        layers,
        dtype,
        device,
        progress,
        setting=config.attention_backend,
        block_size=config.block_size,
        batch_invariant=config.batch_invariant,
    )


def _build(
    model: PreTrainedModel,
    layers: list[LayerShape],
    backend: AttentionBackend,
    shape: ModelShape,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    group: ShardGroup,
) -> Runner:
    # One block more than the scheduler knows of: what pads a tile or a captured step is written there.
    cache = KVCache(layers, shape.num_blocks + 1, shape.block_size, model.dtype, next(model.parameters()).device)
    return Runner(
        model, cache, backend, shape, scheduler.max_num_seqs, batch_invariant=config.batch_invariant, group=group
    )


def _record(runner: Runner) -> None:
    """Over the pool that memory is measured with: nothing in it could be compared, and a failure is told later."""
    with torch.inference_mode():
        runner.capture(CudaCapture(), lambda _: None, is_checked=False)


def _fitting_shape(
    model: PreTrainedModel,
    layers: list[LayerShape],
    backend: AttentionBackend,
    card: ModelCard,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    progress: Progress,
    group: ShardGroup,
    record: Callable[[Runner], None] | None,
) -> ModelShape:
    """Size the pool and the longest context by what the device can spare; `record` takes what captured steps take. On
    the CPU the packed weights to come count as if no published one were given up for them, which is the worst case."""
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
            record,
        )
        memory = cuda_spare_memory(free, config.gpu_memory_utilization, device)
    else:
        memory = cpu_spare_memory(group.size, packed_bytes(model) if group.size == 1 else 0)
    memory = SpareMemory(group.least(memory.unasked), group.least(memory.most))
    pool = fit_pool(config, layers, block_size, model.dtype, memory, card.max_position, num_spare=1)
    require_windows_in_calls(model, pool.max_model_len)
    return replace(
        shape,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
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
        self._num_lanes = num_lanes
        self._graphs: DecodeGraphs | None = None

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def is_async(self) -> bool:
        return self._device.type == "cuda"

    def capture(self, capture: GraphCapture, progress: Progress, *, is_checked: bool = True) -> None:
        """Record decode steps, where backend and model allow it: `progress` says why not. Checked against eager ones,
        which `check_through_pool` must have run before."""
        if self._batch_invariant or not isinstance(self._backend, PagedBackend):
            progress("decode steps are not captured: this attention backend prepares each step anew")
            return
        graphs = DecodeGraphs(self._run, self._backend, self._cache, self._lane_tokens, self._shape, self._num_lanes)
        self._graphs = captured(graphs, capture, self._forward if is_checked else None, progress)

    def submit(self, plan: StepPlan) -> InFlight:
        """Start the step; on the CPU it is done on return."""
        for joined in plan.joined:
            self._sampler.join(joined)
        with device_errors(), torch.inference_mode():
            return InFlight(plan, *self._sample(plan, self.logits(plan)))

    def logits(self, plan: StepPlan) -> Tensor:
        """Run the forward and return float32 logits [sum of num_logits, V], rows in plan order."""
        if self._graphs is not None and (replayed := self._graphs.logits(plan)) is not None:
            return replayed
        if not self._batch_invariant:
            return self._forward(plan)
        return torch.cat([self._forward(tile) for tile in tile_plans(plan, self._shape.num_blocks)])

    def _forward(self, plan: StepPlan) -> Tensor:
        if self._device.type == "cpu":
            use_threads(torch.get_num_threads())  # numba's number is the calling thread's
        inputs = build_inputs(plan, self._cache.block_size, self._device, self._cache.num_blocks)
        if inputs.pending.numel():
            pending = self._lane_tokens.find(inputs.pending_lanes, inputs.pending_draws)
            inputs.token_ids[inputs.pending] = pending
        wanted = keep = inputs.logits_rows
        if self._batch_invariant and wanted.numel():
            keep = torch.arange(len(plan.token_ids), device=self._device)
        logits = self._run(inputs.token_ids, inputs.positions, self._backend.prepare(inputs.layout, self._cache), keep)
        return logits if keep is wanted else logits[wanted]

    def _run(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, keep: Tensor | int = 0) -> Tensor:
        """The model's forward: float32 logits at the places `keep`; 0: at all."""
        if self._model is None:
            raise RuntimeError("the runner is closed")
        with attention_step(step):
            output: Any = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def _sample(self, plan: StepPlan, logits: Tensor) -> tuple[list[int], Tensor, Tensor]:
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        if not rows:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return rows, nothing, nothing.bool()
        last = np.cumsum(plan.num_logits)[rows] - 1
        chosen = logits if len(rows) == len(logits) else logits[to_device(last, self._device)]
        tokens, sound = self._sampler.sample(chosen, plan, rows)
        numbers = [plan.output_index[row] for row in rows]
        self._lane_tokens.keep([plan.lanes[row] for row in rows], numbers, tokens)
        return rows, tokens, sound

    def close(self) -> None:
        """Give weights and KV cache back."""
        self._model = None
        self._graphs = None
        self._cache.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _startup_memory_errors(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (OutOfDeviceMemory, MemoryError, RuntimeError) as error:
        if not isinstance(error, OutOfDeviceMemory) and not is_out_of_memory(error):
            raise
        share = "--gpu-memory-utilization" if device.type == "cuda" else "--kv-cache-memory-bytes"
        raise ResourceError(
            f"the memory of {device} is too small: lower --max-num-batched-tokens, {share} or --num-blocks"
        ) from error
