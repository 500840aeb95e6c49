"""Checkpoints as they are published: in parts, tied, pickled, quantised, without what is optional, and damaged."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.errors import ModelNotFound, ModelUnsupported, ResourceError, StartupError
from replica.model.host_memory import available_bytes
from replica.model.runner import Runner
from replica.model_card import ModelCard
from tests.model.paged_logits import dense_logits, distance, load, paged_logits
from tests.model.tiny_models import make_model, save_tiny

_WEIGHTS = "model.safetensors"


def _answers_like_the_original(runner: Runner, family: str = "llama", **changes: Any) -> bool:
    return distance(paged_logits(runner), dense_logits(make_model(family, **changes))) < 2e-5


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / _WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / _WEIGHTS), folder / "pytorch_model.bin")
    (folder / _WEIGHTS).unlink()


def _to_shards(folder: Path) -> list[Path]:
    make_model("llama").save_pretrained(folder, max_shard_size="60KB")
    (folder / _WEIGHTS).unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    _to_shards(tmp_path)
    assert _answers_like_the_original(load(card, tmp_path))


def test_tied_embeddings_are_loaded_once(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / _WEIGHTS)
    assert _answers_like_the_original(load(card, tmp_path), tie_word_embeddings=True)


def test_a_configuration_without_architectures_is_enough(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    _edit_config(tmp_path, architectures=None)
    assert _answers_like_the_original(load(card, tmp_path))


def test_a_pickled_checkpoint_is_read_as_data(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    _to_pickle(tmp_path)
    assert _answers_like_the_original(load(card, tmp_path))


def test_code_in_a_pickled_checkpoint_is_not_run(tmp_path: Path) -> None:
    card = save_tiny("llama", tmp_path)
    witness = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    _to_pickle(tmp_path)
    torch.save({"model.norm.weight": Trap()}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(StartupError, match=str(tmp_path)):
        load(card, tmp_path)
    assert not witness.exists()


def _cut(folder: Path) -> None:
    content = (folder / _WEIGHTS).read_bytes()
    (folder / _WEIGHTS).write_bytes(content[:-100])


def _damage(folder: Path) -> None:
    content = bytearray((folder / _WEIGHTS).read_bytes())
    content[8:40] = b"x" * 32
    (folder / _WEIGHTS).write_bytes(content)


def _lose_a_shard(folder: Path) -> None:
    _to_shards(folder)[1].unlink()


def _lose_a_tensor(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))  # type: ignore[arg-type]


def _change_a_shape(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))


def _name_a_shape(folder: Path) -> None:
    content = (folder / _WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = ["64"]
    text = json.dumps(header).encode()
    (folder / _WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _name_a_long_shard(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "other.safetensors")
    (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": "a" * 300}}))


_DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("harm", "kind", "line"),
    [
        (_name_a_shape, ModelNotFound, r"model\.safetensors is damaged or no safetensors file; fetch it again"),
        (_name_a_long_shard, ModelNotFound, r"names a file that can't be in its folder: 'a{100}'"),
        (lambda folder: (folder / "config.json").write_text(_DEEP), ModelNotFound, r"config\.json can't be read"),
        (
            lambda folder: (folder / _WEIGHTS).write_bytes((200_000).to_bytes(8, "little") + _DEEP.encode()),
            ModelNotFound,
            r"model\.safetensors is damaged or no safetensors file; fetch it again",
        ),
        (_cut, ModelNotFound, r"model\.safetensors is cut: \d+ bytes are announced, \d+ are there; fetch it again"),
        (_damage, ModelNotFound, r"model\.safetensors is damaged or no safetensors file; fetch it again"),
        (lambda folder: (folder / _WEIGHTS).write_bytes(b""), ModelNotFound, r"is cut or no safetensors file"),
        (
            lambda folder: (folder / _WEIGHTS).unlink(),
            ModelNotFound,
            r"has no weights: neither model\.safetensors nor pytorch_model\.bin",
        ),
        (_lose_a_shard, ModelNotFound, r"is incomplete: model-00002-of-\d+\.safetensors is missing"),
        (_lose_a_tensor, ModelUnsupported, r"lacks model\.layers\.1\.self_attn\.q_proj\.weight"),
        (_change_a_shape, ModelUnsupported, r"has in another shape model\.norm\.weight$"),
        (lambda folder: (folder / "config.json").write_text("{"), ModelNotFound, r"config\.json can't be read"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(
    harm: Callable[[Path], object], kind: type[StartupError], line: str, tmp_path: Path
) -> None:
    card = save_tiny("llama", tmp_path)
    harm(tmp_path)
    with pytest.raises(kind, match=line) as caught:
        load(card, tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("num_weights", "size", "advice"),
    [(10**12, r"8000\.00", "choose a smaller model"), (None, r"\d+\.\d\d", "set --dtype bfloat16")],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    num_weights: int | None, size: str, advice: str, tmp_path: Path
) -> None:
    """The second case fits in 2 bytes a weight, not in the 8 that a float32 takes: as published, and packed."""
    card = save_tiny("llama", tmp_path)
    num_weights = num_weights or available_bytes() // 4
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_weights], "data_offsets": [0, 2 * num_weights]}}).encode()
    with (tmp_path / _WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * num_weights)  # a file of nothing but holes
    line = rf"^the weights of llama take {size} GB in float32, \d+\.\d\d GB of memory are left on cpu; {advice}$"
    with pytest.raises(ResourceError, match=line):
        load(card, tmp_path)


def _take_all_memory(*_args: Any, **_kwargs: Any) -> Any:
    torch.empty(1 << 58)


@pytest.mark.parametrize(
    "where",
    [
        "replica.model.weights.AutoModelForCausalLM.from_pretrained",
        "replica.model.support.dense_logits",
        "replica.model.support.ProbeStep.attend",
    ],
    ids=["loading", "the dense forward", "the packed forward"],
)
def test_memory_that_ends_while_weights_are_loaded_or_tested_is_told_as_that(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = save_tiny("llama", tmp_path)
    monkeypatch.setattr(where, _take_all_memory)
    line = "the weights of llama don't fit the memory of cpu; choose a smaller model or --dtype bfloat16"
    with pytest.raises(ResourceError) as caught:
        load(card, tmp_path)
    assert caught.value.message == line


_QUANTISED: dict[str, tuple[dict[str, Any], str, str]] = {
    "awq": ({"bits": 4, "group_size": 128, "zero_point": True}, "gptqmodel", "gptqmodel"),
    "gptq": ({"bits": 4, "group_size": 128}, "gptqmodel", "optimum"),
    "bitsandbytes": ({"load_in_4bit": True}, "bitsandbytes", "bitsandbytes"),
    "compressed-tensors": ({"format": "pack-quantized"}, "compressed_tensors", "compressed-tensors"),
    "fbgemm_fp8": ({}, "fbgemm_gpu", "requires a GPU"),
    "torchao": ({"quant_type": "int8_weight_only"}, "torchao", "torchao"),
    "quanto": ({"weights": "int8"}, "optimum", "optimum-quanto"),
    "from_the_future": ({}, "from_the_future", "Unknown quantization type"),
}


@pytest.mark.parametrize("method", _QUANTISED)
def test_a_quantisation_that_needs_what_is_not_here_is_refused_by_name(method: str, tmp_path: Path) -> None:
    settings, package, missing = _QUANTISED[method]
    if find_spec(package):
        pytest.skip(f"{package} is installed, so that transformers may compute {method}")
    card = save_tiny("llama", tmp_path)
    _edit_config(tmp_path, quantization_config={"quant_method": method, **settings})
    line = f"^llama is quantised with {method}, which can't be computed on cpu here: .*{missing}"
    with pytest.raises(ModelUnsupported, match=line) as caught:
        load(card, tmp_path)
    assert "\n" not in caught.value.message


def _save_fp8(folder: Path) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    """A checkpoint with 8-bit linear weights and a scale for each 16 x 16 tile; and the weights that they stand for."""
    card = save_tiny("llama", folder)
    meant: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tiles = tensors[name].view(rows // 16, 16, columns // 16, 16)
            scales = tiles.abs().amax(dim=(1, 3)) / 448
            small = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            meant[name] = (small.float() * scales[:, None, :, None]).view(rows, columns)
            tensors[name] = small.view(rows, columns)
            tensors[f"{name}_scale_inv"] = scales

    _edit_weights(folder, quantise)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    _edit_config(folder, quantization_config=settings)
    return card, meant


def _save_mxfp4(folder: Path) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    """A checkpoint with 4-bit experts, a power of two for each 32 of them; and the weights that they stand for."""
    card = save_tiny("gpt_oss", folder)
    meant: dict[str, torch.Tensor] = {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    generator = torch.Generator().manual_seed(1)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            shape = experts, rows, columns // 32
            pairs = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(123, 126, shape, generator=generator, dtype=torch.uint8)
            numbers = values[torch.stack([pairs & 15, pairs >> 4], dim=-1).long()].flatten(-2)
            exact = numbers * torch.exp2(scales.float() - 127)[..., None]
            meant[name] = exact.view(experts, rows, columns).transpose(1, 2)
            tensors |= {f"{name}_blocks": pairs, f"{name}_scales": scales}

    _edit_weights(folder, quantise)
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": plain})
    return card, meant


@pytest.mark.parametrize(("family", "save"), [("llama", _save_fp8), ("gpt_oss", _save_mxfp4)])
def test_weights_that_are_expanded_on_the_cpu_answer_as_what_they_stand_for(
    family: str, save: Callable[[Path], tuple[ModelCard, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    card, meant = save(tmp_path)
    wanted = make_model(family)
    original = dense_logits(wanted)
    wanted.load_state_dict(meant, strict=False)
    found = paged_logits(load(card, tmp_path))
    assert distance(found, dense_logits(wanted)) < 2e-5
    assert distance(found, original) > 1e-3
