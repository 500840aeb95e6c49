"""Every setting of one replica: one frozen tree, checked when it is built.

Names are the field's (vLLM's where the meaning is the same). Nothing here reads the environment; files and flags are
read by `deployments/config.py`, which builds this tree. A setting out of range raises `SettingError`.
Sizes are tokens unless a suffix says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replica.errors import SettingError
from replica.setting_range import (
    COUNT,
    COUNT_OR_NONE,
    OPTIONAL_COUNT,
    POSITIVE_S,
    SECONDS,
    SWITCH,
    SettingRange,
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who computes in a step. The two limits don't replace each other; `replica/scheduler/scheduler.py` states the
    rule.

    `max_num_seqs`: sequences in one step, at most. `max_num_batched_tokens`: tokens in one step, at most; at least
    `max_num_seqs + 1`, so that a prefill can always move. `watermark`: share of KV blocks kept free when admitting.
    `scheduler_reserve_full_isl`: admit only when the whole input fits. `max_num_queued_seqs`, `max_num_queued_tokens`,
    `queue_timeout_s`: bounds of the waiting queue; preempted sequences are exempt.

    Prefill: `enable_chunked_prefill` off: a prompt enters only whole, and `max_num_batched_tokens` must be at least
    `max_model_len`. `long_prefill_token_threshold`: cap on one sequence's chunk in a step (0: none).
    `max_num_partial_prefills`: sequences mid-prefill at once (None: no limit); `max_long_partial_prefills`: of those,
    how many may have more than the threshold to compute. `max_prefill_skip_s`: a long prompt that others have passed
    for this long is passed by nobody.

    Order: `policy` `fcfs`, or `priority`: lower number first, then arrival; `priority_ageing_s` of waiting improve it
    by one. `kv_bypass_s`: for how long requests of at most `kv_bypass_blocks` (prompt and `max_tokens`) may pass a head
    that waits for KV space. `batching` `static`: a fixed batch, refilled only when every member has ended (the baseline
    to measure against).
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    max_num_queued_seqs: int = 1024
    max_num_queued_tokens: int = 1_000_000
    queue_timeout_s: float = 60.0
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    max_prefill_skip_s: float = 10.0
    kv_bypass_s: float = 5.0
    kv_bypass_blocks: int = 4
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_ageing_s: float = 30.0
    batching: Literal["continuous", "static"] = "continuous"

    def __post_init__(self) -> None:
        for name, allowed in SCHEDULER_RANGES.items():
            allowed.check(name, getattr(self, name))
        self._check_prefill()
        if self.policy not in ("fcfs", "priority"):
            raise SettingError("policy", self.policy, "fcfs or priority")
        if self.batching not in ("continuous", "static"):
            raise SettingError("batching", self.batching, "continuous or static")
        if self.max_num_batched_tokens < self.max_num_seqs + 1:
            allowed_tokens = f"at least max_num_seqs + 1 = {self.max_num_seqs + 1}"
            raise SettingError("max_num_batched_tokens", self.max_num_batched_tokens, allowed_tokens)

    def _check_prefill(self) -> None:
        threshold, partial, long = (
            self.long_prefill_token_threshold,
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
        )
        if long is not None and long > (partial or long):
            allowed = f"at least 1, at most max_num_partial_prefills = {partial}"
            raise SettingError("max_long_partial_prefills", long, allowed)
        if long is not None and not threshold:
            allowed = "only with long_prefill_token_threshold, which says what is long"
            raise SettingError("max_long_partial_prefills", long, allowed)
        if not self.enable_chunked_prefill and (threshold or partial):
            name = "long_prefill_token_threshold" if threshold else "max_num_partial_prefills"
            raise SettingError(name, threshold or partial, "only with enable_chunked_prefill")


SCHEDULER_RANGES: dict[str, SettingRange] = {
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": SettingRange("whole", "a whole number, at least max_num_seqs + 1", low=2),
    "scheduler_reserve_full_isl": SWITCH,
    "watermark": SettingRange("number", "a number from 0 up to, not including, 1", low=0, high=1, but=(1,)),
    "enable_prefix_caching": SWITCH,
    "max_num_queued_seqs": COUNT,
    "max_num_queued_tokens": COUNT,
    "queue_timeout_s": POSITIVE_S,
    "enable_chunked_prefill": SWITCH,
    "long_prefill_token_threshold": SettingRange("whole", "a whole number, at least 1, or 0 for none", low=0),
    "max_num_partial_prefills": COUNT_OR_NONE,
    "max_long_partial_prefills": COUNT_OR_NONE,
    "max_prefill_skip_s": SECONDS,
    "kv_bypass_s": SettingRange("number", "0 seconds (nobody passes) or more", low=0),
    "kv_bypass_blocks": SettingRange("whole", "a whole number, 0 (nobody passes) or more", low=0),
    "priority_ageing_s": POSITIVE_S,
}
"""Of each setting by itself. What settings forbid each other is checked after that."""


ATTENTION_BACKENDS = ("auto", "varlen", "triton", "pool", "gather", "reference", "tiles")
"""Which of them can serve depends on device, model and machine: said when the model is loaded."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, where and how it is held.

    `model`: `embedded`, a hub id, a local folder or a .gguf file. `device` `auto` is cuda when there is one, else cpu;
    `dtype` `auto` is bfloat16 on a GPU and float32 on the CPU. `max_model_len` None: the model's own limit, cut to
    what the KV pool holds. `num_blocks` None: from memory (`gpu_memory_utilization` of the GPU, or
    `kv_cache_memory_bytes`). `block_size` None: what the attention backend likes. `num_threads` None: all cores (CPU
    only). `tensor_parallel_size`: devices of one machine that hold the model together; memory settings are then those
    of each, `num_threads` that of all. `attention_backend` `auto`: the fastest that serves this model on its device.
    `enforce_eager`: decode steps run kernel by kernel instead of as captured graphs (CUDA only).
    """

    model: str = "embedded"
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    num_threads: int | None = None
    chat_template: str | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    download_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingError("model", self.model, "'embedded', a hub id, a folder or a .gguf file")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise SettingError("dtype", self.dtype, "auto, float32, bfloat16 or float16")
        share = SettingRange("number", "a number, more than 0, at most 1", low=0, high=1, but=(0,))
        share.check("gpu_memory_utilization", self.gpu_memory_utilization)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_blocks", "block_size", "num_threads"):
            OPTIONAL_COUNT.check(name, getattr(self, name))
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise SettingError("attention_backend", self.attention_backend, " or ".join(ATTENTION_BACKENDS))
        for name in ("enforce_eager", "batch_invariant"):
            SWITCH.check(name, getattr(self, name))
        COUNT.check("tensor_parallel_size", self.tensor_parallel_size)
        if self.batch_invariant and self.tensor_parallel_size > 1:
            raise SettingError("batch_invariant", True, "only with tensor_parallel_size = 1")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One replica's engine: the model, the scheduler and how failures are noticed.

    `stall_timeout_s`: work is pending and no step has ended for this long: the engine counts as dead.
    `lease_timeout_s`: a stream that its ingress didn't renew for this long is aborted.
    `max_backlog_tokens`: a stream whose reader is this far behind is aborted.
    `check_invariants`: the scheduler checks itself after every plan and commit, and a contradiction ends the engine,
    with what broke in the log (tests, or a suspicious live replica; 8 ms a step with 256 running).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    stall_timeout_s: float = 60.0
    lease_timeout_s: float = 5.0
    max_backlog_tokens: int = 4096
    check_invariants: bool = False

    def __post_init__(self) -> None:
        POSITIVE_S.check("stall_timeout_s", self.stall_timeout_s)
        POSITIVE_S.check("lease_timeout_s", self.lease_timeout_s)
        COUNT.check("max_backlog_tokens", self.max_backlog_tokens)
        SWITCH.check("check_invariants", self.check_invariants)
