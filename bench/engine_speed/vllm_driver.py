"""The peer's side: offline `vllm.LLM.generate`, driven over pipes. Its interpreter has vLLM and nothing of ours.

    python -m bench.engine_speed.vllm_driver MODEL_FOLDER     (from the root of the project; started by `sides.py`)

In: {"prompts": [[id, ...], ...], "num_output_tokens": n}. Out: {"seconds": s, "outputs": [[id, ...], ...]}. As shipped,
but for what makes both sides do the same work: float32, no prefix cache, ids instead of text. Its environment (cores,
KV cache) is its starter's to set.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from bench.peers.driver_loop import Answer, serve

_MAX_MODEL_LEN = 2048


def load(folder: str) -> tuple[str, Answer]:
    import vllm
    from vllm import LLM, SamplingParams

    model = LLM(model=folder, dtype="float32", enable_prefix_caching=False, max_model_len=_MAX_MODEL_LEN)

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        num_tokens = order["num_output_tokens"]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        began = perf_counter()
        outputs = model.generate(asked, params, use_tqdm=False)
        seconds = perf_counter() - began
        return {"seconds": seconds, "outputs": [list(output.outputs[0].token_ids) for output in outputs]}

    return vllm.__version__, answer


if __name__ == "__main__":
    import sys

    serve(lambda: load(sys.argv[1]))
