"""Which models can be split over how many processes. Asked before weights are read, because transformers itself only
fails in the first forward, with a message about shapes."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from transformers import PretrainedConfig

from replica.errors import ModelUnsupported, SettingError, StartupError

_SETTING = "tensor_parallel_size"
_HEADS = {
    "num_attention_heads": "{} attention heads",
    "num_key_value_heads": "{} KV heads",
    "num_global_key_value_heads": "{} KV heads in full attention",
}
_WIDTHS = {
    "intermediate_size": "MLPs {} wide",
    "moe_intermediate_size": "experts {} wide",
}


def require_shardable(name: str, config: PretrainedConfig, size: int) -> None:
    """Raises `ModelUnsupported` for a model that transformers has no plan to shard, `SettingError` for a size that
    doesn't divide what the plan cuts, with the sizes that do."""
    text: Any = config.get_text_config()
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelUnsupported(
            f"{name} can't be split: transformers has no plan to shard {config.model_type}; "
            "leave --tensor-parallel-size at 1"
        )
    cut = {words: number for words, number in _cut_numbers(text, plan).items() if number}
    common = gcd(*cut.values()) if cut else size
    if common % size:
        sizes = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        what = " and ".join(words.format(number) for words, number in cut.items() if number % size)
        raise SettingError(_SETTING, size, f"{name} has {what}; sizes that divide all that is cut: {sizes}")


def _cut_numbers(text: Any, plan: dict[str, str]) -> dict[str, int]:
    """What must divide by the size. Some plans keep all heads in every process (their projections are gathered)."""
    names: dict[str, str] = dict(_WIDTHS)
    if any("attn" in rule or "attention" in rule for rule, style in plan.items() if style == "colwise"):
        names = _HEADS | names
    numbers = {words: getattr(text, attribute, None) for attribute, words in names.items()}
    return {words: number for words, number in numbers.items() if isinstance(number, int)}


def shard_device(setting: str, size: int, rank: int) -> torch.device:
    """Rank i computes on GPU i of those that this process sees. Raises `StartupError` when there are too few, or when
    the setting names one device for all."""
    num_gpus = torch.cuda.device_count()
    if setting == "cpu" or (setting == "auto" and not num_gpus):
        if num_gpus:
            # transformers places shards on the GPUs that it sees.
            raise StartupError(
                f"{_SETTING} = {size} on the CPU is for tests, on machines without a GPU; set --device cuda"
            )
        return torch.device("cpu")
    if setting not in ("auto", "cuda"):
        raise SettingError("device", setting, f"auto, cpu or cuda with {_SETTING} = {size}")
    if num_gpus < size:
        raise SettingError(_SETTING, size, f"this process sees {num_gpus} GPUs, and each shard needs one")
    return torch.device("cuda", rank)
