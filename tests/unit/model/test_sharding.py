"""Which models can be split over how many processes, told before weights are read."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from replica.errors import ModelUnsupported, SettingError, StartupError
from replica.model.tensor_parallel.sharding import require_shardable, shard_device

LLAMA = {"hidden_size": 72 * 8, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


def require(family: str, size: int, **changes: Any) -> None:
    require_shardable("the model", AutoConfig.for_model(family, **changes), size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_size_that_divides_heads_kv_heads_and_widths_is_taken(size: int) -> None:
    require("llama", size, **LLAMA)


@pytest.mark.parametrize(
    ("changes", "size", "sizes"),
    [
        ({}, 8, "1, 2, 4"),
        ({}, 3, "1, 2, 4"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "1, 3"),
        ({"num_key_value_heads": 1}, 2, "1"),
        ({"intermediate_size": 99}, 2, "1"),
    ],
)
def test_another_size_is_refused_with_those_that_divide(changes: dict[str, int], size: int, sizes: str) -> None:
    with pytest.raises(SettingError) as refused:
        require("llama", size, **(LLAMA | changes))
    assert refused.value.message.startswith(f"tensor_parallel_size = {size} is not allowed: the model has ")
    assert refused.value.message.endswith(f"; sizes that divide all that is cut: {sizes}")


def test_only_what_does_not_divide_is_named() -> None:
    with pytest.raises(SettingError) as refused:
        require("mixtral", 2, **(LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}))
    assert refused.value.message == (
        "tensor_parallel_size = 2 is not allowed: the model has 3 KV heads; sizes that divide all that is cut: 1, 3"
    )


def test_heads_that_stay_whole_in_every_process_need_not_divide() -> None:
    require("phi3", 2, hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=96)


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupported, match=r"^the model can't be split: transformers has no plan to shard gpt2; "):
        require("gpt2", 2)


def test_each_shard_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [str(shard_device("auto", 4, rank)) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(SettingError, match=r"^tensor_parallel_size = 8 is not allowed: this process sees 4 GPUs"):
        shard_device("cuda", 8, 0)
    with pytest.raises(SettingError, match=r"^device = 'cuda:1' is not allowed: auto, cpu or cuda with"):
        shard_device("cuda:1", 2, 0)
    with pytest.raises(StartupError, match="on the CPU is for tests"):
        shard_device("cpu", 2, 0)


def test_without_gpus_shards_are_processes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert str(shard_device("auto", 2, 1)) == str(shard_device("cpu", 2, 1)) == "cpu"
    with pytest.raises(SettingError, match="this process sees 0 GPUs"):
        shard_device("cuda", 2, 0)
