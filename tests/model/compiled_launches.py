"""Compiles what `TritonBackend` launches for a GPU that isn't here, instead of running it: one JSON line a kernel.

python -m tests.model.compiled_launches 90        (compute capability; without TRITON_INTERPRET)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replica.model.attention import triton_paged
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from tests.model.plans import Row, make_plan
from tests.model.ragged import World

LAYERS = {
    "llama-8b": (LayerShape(32, 8, 128, 128), torch.bfloat16),
    "gpt-oss": (LayerShape(64, 8, 64, 64, window=128, has_sinks=True), torch.bfloat16),
    "gemma-2": (LayerShape(8, 4, 256, 256, window=4096, softcap=50.0), torch.bfloat16),
    "deepseek": (LayerShape(16, 16, 192, 128), torch.float16),
    "smollm2 in float32": (LayerShape(9, 3, 64, 64), torch.float32),
}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, layer: str, capability: int) -> None:
        self._kernel, self._layer, self._capability = kernel, layer, capability

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        names = self._kernel.arg_names
        types = {name: _type(argument) for name, argument in zip(names, arguments, strict=False)}
        assert set(types) | set(constants) == set(names)
        pointers = [place for place, name in enumerate(names) if types.get(name, "").startswith("*")]
        source = ASTSource(
            fn=self._kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
        )
        made = triton.compile(
            source,
            target=GPUTarget("cuda", self._capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        split = constants.get("SPLIT")
        print(json.dumps([self._layer, self._kernel.fn.__name__, split, made.metadata.shared]), flush=True)


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def main(capability: int, names: list[str]) -> None:
    kernels = {name: getattr(triton_paged, name) for name in ("attend_tiles", "merge_shares", "write_slots")}
    backend = triton_paged.TritonBackend(num_processors=132)
    for name in names or list(LAYERS):
        layer, dtype = LAYERS[name]
        for kernel, real in kernels.items():
            setattr(triton_paged, kernel, Compiler(real, name, capability))
        size = backend.block_size
        cache = KVCache([layer], 8, size, dtype, torch.device("cpu"))
        rows = [Row(0, 0, [0] * 70, [0, 1]), Row(1, 99, [0], [2, 3])]
        layout = build_inputs(make_plan(1, rows), size, torch.device("cpu")).layout
        backend.prepare(layout, cache).attend(World(layer, size, 0, dtype).call(71))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
