"""What a step costs at least: weights once, keys and values once, every product; from a plan and a model's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine_speed.limits import MachineLimits, ModelLoad, StepLoad, middle, model_load
from tests.model.plans import Row, make_plan

MODEL = ModelLoad(body_weights=1000, head_weights=100, weight_bytes=4, kv_bytes_per_token=8, ops_per_pair=16)
SHAPES = {
    "model.embed_tokens.weight": [50, 8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.mlp.up_proj.weight": [16, 8],
    "model.layers.0.input_layernorm.weight": [8],
}
CONFIG = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}


def test_a_decode_reads_its_context_and_sees_all_of_it() -> None:
    plan = make_plan(0, [Row(0, 9, [7], [0])])
    assert MODEL.of_step(plan) == StepLoad(1100 * 4 + 8 * (10 + 1), 2.0 * 1100 + 16.0 * 10)


def test_a_chunk_without_logits_leaves_the_output_matrix_alone() -> None:
    plan = make_plan(0, [Row(0, 4, [1, 2, 3], [0, 1], num_logits=0)])
    # queries at 4, 5 and 6 see 5 + 6 + 7 keys
    assert MODEL.of_step(plan) == StepLoad(1000 * 4 + 8 * (7 + 3), 2.0 * 1000 * 3 + 16.0 * 18)


def test_rows_share_the_weights_but_not_the_work() -> None:
    plan = make_plan(0, [Row(0, 9, [7], [0]), Row(1, 0, [1, 2], [1])])
    assert MODEL.of_step(plan) == StepLoad(1100 * 4 + 8 * (10 + 2 + 3), 2.0 * (1000 * 3 + 100 * 2) + 16.0 * (10 + 3))


def test_layers_with_a_window_see_and_read_no_more_than_it() -> None:
    windowed = replace(MODEL, window=4, windowed_share=0.25)
    decode = make_plan(0, [Row(0, 9, [7], [0])])
    # 4 of 10 keys in a quarter of the layers
    assert windowed.of_step(decode) == StepLoad(1100 * 4 + 8 * (8.5 + 1), 2.0 * 1100 + 16.0 * 8.5)
    chunk = make_plan(0, [Row(0, 2, [1, 2, 3], [0, 1])])
    # queries at 2, 3 and 4 see 3 + 4 + 5 keys of 5; within the window 3 + 4 + 4, and all 5 are read
    assert windowed.of_step(chunk) == StepLoad(1100 * 4 + 8 * (5 + 3), 2.0 * (1000 * 3 + 100) + 16.0 * 11.75)
    short = make_plan(0, [Row(0, 0, [1, 2, 3], [0])])
    assert windowed.of_step(short) == MODEL.of_step(short)


def test_the_slower_of_moving_and_computing_is_the_limit() -> None:
    limits = MachineLimits(bandwidth=100.0, rate=1000.0)
    assert StepLoad(200.0, 1000.0).floor_s(limits) == 2.0
    assert StepLoad(200.0, 5000.0).floor_s(limits) == 5.0


def test_the_limits_of_a_run_are_the_medians() -> None:
    listed = [MachineLimits(3.0, 10.0), MachineLimits(1.0, 30.0), MachineLimits(2.0, 20.0)]
    assert middle(listed) == MachineLimits(2.0, 20.0)


def save_model(folder: Path, shapes: dict[str, list[int]], config: Mapping[str, object]) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps(config))


def test_what_a_model_costs_is_in_its_files(tmp_path: Path) -> None:
    save_model(tmp_path, SHAPES, CONFIG)
    body = 64 + 32 + 128
    assert model_load(tmp_path, 32) == ModelLoad(body, 400, 4, 32, ops_per_pair=4 * 8)


def test_an_output_matrix_of_its_own_takes_the_embeddings_place(tmp_path: Path) -> None:
    save_model(tmp_path, {**SHAPES, "lm_head.weight": [40, 8]}, {**CONFIG, "head_dim": 16})
    found = model_load(tmp_path, 32)
    assert (found.body_weights, found.head_weights, found.ops_per_pair) == (224, 320, 4 * 2 * 16)


def test_an_output_matrix_with_embed_in_its_name_is_no_embedding(tmp_path: Path) -> None:
    body = {name: shape for name, shape in SHAPES.items() if "embed" not in name}
    save_model(tmp_path, {**body, "gpt_neox.embed_in.weight": [50, 8], "embed_out.weight": [40, 8]}, CONFIG)
    found = model_load(tmp_path, 32)
    assert (found.body_weights, found.head_weights) == (224, 320)


@pytest.mark.parametrize("table", ["transformer.wpe.weight", "model.decoder.embed_positions.weight"])
def test_a_table_of_positions_is_multiplied_by_nothing(table: str, tmp_path: Path) -> None:
    save_model(tmp_path, {**SHAPES, table: [30, 8]}, CONFIG)
    found = model_load(tmp_path, 32)
    assert (found.body_weights, found.head_weights) == (224, 400)


@pytest.mark.parametrize(
    ("settings", "window", "share"),
    [
        ({}, 0, 0.0),
        ({"sliding_window": None}, 0, 0.0),
        ({"sliding_window": 7}, 7, 1.0),
        ({"sliding_window": 7, "use_sliding_window": False}, 0, 0.0),
        ({"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}, 7, 0.5),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, 7, 0.0),
    ],
)
def test_windows_are_those_of_the_configuration(
    settings: dict[str, object], window: int, share: float, tmp_path: Path
) -> None:
    save_model(tmp_path, SHAPES, {**CONFIG, **settings})
    found = model_load(tmp_path, 32)
    assert (found.window, found.windowed_share) == (window, share)


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, SHAPES, {**CONFIG, "num_local_experts": 4})
    with pytest.raises(ValueError, match="routed experts"):
        model_load(tmp_path, 32)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"no \.safetensors files"):
        model_load(tmp_path, 32)
