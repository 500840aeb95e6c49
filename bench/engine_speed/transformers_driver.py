"""The peer's side: `transformers`' own continuous batching, driven over pipes.

    python -m bench.engine_speed.transformers_driver MODEL_FOLDER NUM_THREADS MAX_SEQS NUM_PAGES

Run from the root of the project, in any interpreter that has transformers; started by `sides.py`.
In: {"prompts": [[id, ...], ...], "num_output_tokens": n}. Out: {"seconds": s, "outputs": [[id, ...], ...]}. As shipped,
but for what makes all sides do the same work (float32, no EOS, no shared prefixes), for the size of its KV cache, which
by default takes most of the machine's memory, and for the tokens of a step, whose masks would take the rest. What it
prepares once isn't timed.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from bench.peers.driver_loop import Answer, serve

PAGE_SIZE = 256
MAX_BATCH_TOKENS = 512


def load(folder: str, num_threads: int, max_seqs: int, num_pages: int) -> tuple[str, Answer]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(num_threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    config: Any = GenerationConfig
    model.eval()
    greedy = config(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=num_pages,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=max_seqs,
        allow_block_sharing=False,
    )

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        began = perf_counter()
        outputs = model.generate_batch(
            order["prompts"],
            generation_config=greedy,
            continuous_batching_config=batching,
            persistent_manager=True,
            max_new_tokens=order["num_output_tokens"],
        )
        seconds = perf_counter() - began
        return {"seconds": seconds, "outputs": [list(output.generated_tokens) for output in outputs.values()]}

    return transformers.__version__, answer


if __name__ == "__main__":
    import sys

    serve(lambda: load(sys.argv[1], *map(int, sys.argv[2:5])))
