"""What a machine could do at best: the shortest time in which it can run a step.

A step reads every weight that it multiplies by once, reads the keys and values of its rows' contexts and writes those
of its own tokens; it multiplies every token by every weight of the layers, every position with logits by the output
matrix, and every query by all the keys and values that it sees. None of that can be faster than the machine streams
bytes, or multiplies: a step takes at least max(bytes / bandwidth, operations / rate). What is left out (embedding rows,
norms, activations) only makes that smaller.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from replica.scheduler.plan import StepPlan

_EMBEDDINGS = ("embed", "wte.")
_HEADS = ("lm_head.weight", "embed_out.weight")
_POSITIONS = ("wpe.", "embed_positions", "position_embedding")
"""Tables of which a token reads a row, never the output matrix."""
_ROUTED = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """`bandwidth` bytes a second, `rate` floating-point operations a second, both with all threads."""

    bandwidth: float
    rate: float


def middle(measured: Iterable[MachineLimits]) -> MachineLimits:
    """The median of each, over the measurements of one run."""
    listed = list(measured)
    return MachineLimits(median(one.bandwidth for one in listed), median(one.rate for one in listed))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step must move and compute at least."""

    num_bytes: float
    num_ops: float

    def floor_s(self, limits: MachineLimits) -> float:
        return max(self.num_bytes / limits.bandwidth, self.num_ops / limits.rate)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What a dense decoder costs: weights by which every token is multiplied (`body_weights`), those of the output
    matrix (`head_weights`), bytes of a weight, KV bytes of a token, and operations of one query on one key and its
    value, all heads and layers together. In `windowed_share` of the layers a query sees the last `window` tokens."""

    body_weights: int
    head_weights: int
    weight_bytes: int
    kv_bytes_per_token: int
    ops_per_pair: int
    window: int = 0
    windowed_share: float = 0.0

    def of_step(self, plan: StepPlan) -> StepLoad:
        num_logits = sum(plan.num_logits)
        contexts, pairs = self._seen(plan)
        weights = self.body_weights + (self.head_weights if num_logits else 0)
        products = self.body_weights * len(plan.token_ids) + self.head_weights * num_logits
        return StepLoad(
            weights * self.weight_bytes + self.kv_bytes_per_token * (contexts + len(plan.token_ids)),
            2.0 * products + float(self.ops_per_pair) * pairs,
        )

    def _seen(self, plan: StepPlan) -> tuple[float, float]:
        """Keys that the rows see, each counted once, and pairs of a query and a key: means over the layers."""
        keys = pairs = 0.0
        for start, n in zip(plan.starts, plan.num_tokens, strict=True):
            keys += start + n
            pairs += _sum_to(start + n) - _sum_to(start)
            if self.windowed_share:
                keys -= self.windowed_share * max(start + 1 - self.window, 0)
                hidden = _sum_to(max(start + n - self.window, 0)) - _sum_to(max(start - self.window, 0))
                pairs -= self.windowed_share * hidden
        return keys, pairs


def _sum_to(number: int) -> int:
    """1 + 2 + ... + number."""
    return number * (number + 1) // 2


def model_load(folder: Path, kv_bytes_per_token: int, weight_bytes: int = 4) -> ModelLoad:
    """Of the prepared model in `folder`, from its configuration and the headers of its weights.

    Raises ValueError for a model with routed experts: which weights a step reads depends on its tokens.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    if any(config.get(name) for name in _ROUTED):
        raise ValueError("the limits of a model with routed experts aren't known")
    shapes = _shapes(folder)
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    head = sum(size for name, size in matrices.items() if name.endswith(_HEADS))
    positions = sum(size for name, size in matrices.items() if any(part in name for part in _POSITIONS))
    embedding = sum(size for name, size in matrices.items() if _is_embedding(name))
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    window, windowed_share = _window(config)
    return ModelLoad(
        body_weights=sum(matrices.values()) - embedding - positions - head,
        head_weights=head or embedding,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        # two products, each of head_size multiplications and additions
        ops_per_pair=4 * heads * head_size * config["num_hidden_layers"],
        window=window,
        windowed_share=windowed_share,
    )


def _is_embedding(name: str) -> bool:
    others = name.endswith(_HEADS) or any(part in name for part in _POSITIONS)
    return not others and any(part in name for part in _EMBEDDINGS)


def _window(config: dict[str, Any]) -> tuple[int, float]:
    """Tokens of the window, and the share of the layers that have it: all, where the configuration doesn't say which,
    since that makes the limit smaller."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0.0
    layers = config.get("layer_types")
    return window, layers.count("sliding_attention") / len(layers) if layers else 1.0


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Of every tensor, by name. A .safetensors file begins with the length of its header, then the header as JSON."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        found |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    if not found:
        raise ValueError(f"there are no .safetensors files in {folder}")
    return found
