"""The peer's side: vLLM's own scheduler, driven over pipes. Runs in an interpreter that has vLLM and nothing of ours.

    python -m bench.scheduler_speed.vllm_driver        (from the root of the project; started by `peer.py`)

In: {"start": [num_running, num_waiting]} or {"round": num_steps}. Out, of a round: {"times": [plan_us, commit_us]}.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from time import thread_time
from typing import Any

from bench.peers.driver_loop import Answer, serve
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

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}
"""A model that is never loaded: the scheduler only asks how long a context may be."""


class VllmScheduler:
    """A `Side`: `vllm.v1.core.sched.scheduler.Scheduler` from plain configurations, without stats (the cheaper way)."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        (folder / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._model = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
        self._config_types = (CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig)
        self._scheduler: Any = None
        self._workload = Workload(0, 0)

    def start(self, workload: Workload) -> None:
        self._workload = workload
        self._scheduler = None
        unsettle_memory()
        self._scheduler = self._build(workload)
        for number in range(workload.num_running):
            self._scheduler.add_request(self._request(number))
        while True:
            plan = self._scheduler.schedule()
            samples = [self._closes(name) for name in plan.num_scheduled_tokens]
            self._scheduler.update_from_output(plan, _output(plan, [[7] if yes else [] for yes in samples]))
            if plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens) == workload.num_running:
                break
        for number in range(workload.num_running, workload.num_requests):
            self._scheduler.add_request(self._request(number))
        settle_memory()

    def run_round(self, num_steps: int) -> StepTimes:
        planned, committed = [], []
        for step in range(num_steps):
            tokens = [[token] for token in self._workload.sampled_ids(step)]
            began = thread_time()
            plan = self._scheduler.schedule()
            planned.append(thread_time() - began)
            output = _output(plan, tokens)
            began = thread_time()
            self._scheduler.update_from_output(plan, output)
            committed.append(thread_time() - began)
            if len(plan.num_scheduled_tokens) != self._workload.num_running:
                raise RuntimeError(f"the step has {len(plan.num_scheduled_tokens)} rows")
        return StepTimes(mean_us(planned), mean_us(committed))

    def _build(self, workload: Workload) -> Any:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        cache_type, device_type, scheduler_type, config_type = self._config_types
        cache = cache_type(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = workload.num_blocks
        scheduler = scheduler_type(
            max_num_seqs=workload.num_running,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        config = config_type(
            model_config=self._model, cache_config=cache, scheduler_config=scheduler, device_config=device_type("cpu")
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=16, dtype=self._model.dtype)
        return Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=workload.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )

    def _request(self, number: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=str(number),
            prompt_token_ids=self._workload.prompt_ids(number),
            sampling_params=SamplingParams(max_tokens=self._workload.max_tokens(number), ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _closes(self, name: str) -> bool:
        """This chunk is the prompt's last, or a decode: the model would sample a token."""
        request = self._scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)


def _output(plan: Any, tokens: list[list[int]]) -> Any:
    """What a model runner hands back: one list of tokens a row."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)


def load(folder: Path) -> tuple[str, Answer]:
    import vllm

    side = VllmScheduler(folder)

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        if "start" in order:
            side.start(Workload(*order["start"]))
            return {"started": True}
        times = side.run_round(order["round"])
        return {"times": [times.plan_us, times.commit_us]}

    return vllm.__version__, answer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        serve(lambda: load(Path(folder)))
