"""Configuration: one tree, derived defaults, and errors that name the setting, its value and what is allowed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import AppConfig, ModelSettings, ServeConfig
from deployments.machine import Machine
from deployments.serve_file import load_serve_config
from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.errors import SettingError

CPU = Machine(has_gpu=False, node_cpus=(8.0,))
GPU = Machine(has_gpu=True, node_cpus=(8.0,))

# Every engine setting with a value that isn't its default.
OTHER_VALUES: dict[str, Any] = {
    "model": "some/model",
    "revision": "main",
    "device": "cpu",
    "dtype": "bfloat16",
    "max_model_len": 77,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1000,
    "num_blocks": 9,
    "block_size": 16,
    "num_threads": 3,
    "chat_template": "{{ messages }}",
    "tensor_parallel_size": 2,
    "attention_backend": "gather",
    "enforce_eager": True,
    "download_dir": "models",
    "max_num_seqs": 7,
    "max_num_batched_tokens": 33,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.25,
    "enable_prefix_caching": False,
    "max_num_queued_seqs": 5,
    "max_num_queued_tokens": 500,
    "queue_timeout_s": 1.5,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 12,
    "max_num_partial_prefills": 3,
    "max_long_partial_prefills": 2,
    "max_prefill_skip_s": 4.5,
    "kv_bypass_s": 5.5,
    "kv_bypass_blocks": 6,
    "policy": "priority",
    "priority_ageing_s": 7.5,
    "batching": "static",
    "stall_timeout_s": 2.5,
    "lease_timeout_s": 3.5,
    "max_backlog_tokens": 99,
    "check_invariants": True,
}


def parsed(**model: Any) -> ModelSettings:
    return AppConfig.parse({"models": [model]}).models[0]


def flat(config: EngineConfig) -> dict[str, Any]:
    parts: tuple[Any, ...] = (config, config.model, config.scheduler)
    return {f.name: getattr(part, f.name) for part in parts for f in fields(part)}


def test_every_engine_setting_can_be_set_and_arrives_in_the_engine() -> None:
    engine = flat(ModelSettings(**OTHER_VALUES).engine_config(CPU, 1))
    settings = [f.name for kind in (ModelConfig, SchedulerConfig) for f in fields(kind)]
    settings += [f.name for f in fields(EngineConfig) if f.name not in ("model", "scheduler")]
    assert sorted([*OTHER_VALUES, "batch_invariant"]) == sorted(settings)
    assert {name: engine[name] for name in OTHER_VALUES} == OTHER_VALUES
    assert flat(ModelSettings(batch_invariant=True).engine_config(CPU, 1))["batch_invariant"] is True


def test_chunked_prefill_can_be_switched_off() -> None:
    engine = parsed(enable_chunked_prefill=False, max_num_batched_tokens=2048).engine_config(CPU, 1)
    assert engine.scheduler.enable_chunked_prefill is False


def test_settings_that_are_not_given_keep_the_engines_defaults() -> None:
    engine = parsed().engine_config(CPU, 8)
    assert engine == EngineConfig(ModelConfig(device="cpu", num_threads=1), SchedulerConfig())


@pytest.mark.parametrize(
    ("given", "machine", "limits"),
    [
        ({}, CPU, (64, 512)),
        ({}, GPU, (256, 8192)),
        ({"device": "cpu"}, GPU, (64, 512)),
        ({"device": "cuda"}, CPU, (256, 8192)),
        ({"max_num_seqs": 4}, CPU, (4, 512)),
        ({"max_num_seqs": 1000}, CPU, (1000, 1001)),
        ({"max_num_batched_tokens": 32}, CPU, (31, 32)),
        ({"max_num_batched_tokens": 32}, GPU, (31, 32)),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 5}, GPU, (4, 5)),
    ],
)
def test_limits_follow_the_device_and_each_other(
    given: dict[str, Any], machine: Machine, limits: tuple[int, int]
) -> None:
    scheduler = parsed(**given).engine_config(machine, 1).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == limits


@pytest.mark.parametrize(
    ("replicas", "num_threads", "num_cpus"), [(1, 8, 8.0), (3, 2, 2.0), (8, 1, 1.0), (24, 1, 0.33)]
)
def test_cores_are_divided_among_the_replicas_of_a_machine_without_a_gpu(
    replicas: int, num_threads: int, num_cpus: float
) -> None:
    settings = parsed(replicas=replicas)
    assert settings.engine_config(CPU, replicas).model.num_threads == num_threads
    assert settings.ray_resources(CPU, replicas) == {"num_cpus": num_cpus, "num_gpus": 0.0}
    assert num_cpus * replicas <= 8


def test_a_gpu_replica_takes_one_gpu_unless_told_otherwise() -> None:
    assert parsed().ray_resources(GPU, 4) == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert parsed(num_gpus=0.5, num_cpus=2).ray_resources(GPU, 4) == {"num_cpus": 2.0, "num_gpus": 0.5}
    assert parsed(device="cpu").ray_resources(GPU, 4) == {"num_cpus": 2.0, "num_gpus": 0.0}
    assert parsed().engine_config(GPU, 1).model.num_threads is None


def test_a_replica_split_over_gpus_takes_them_all_from_one_node() -> None:
    split = parsed(tensor_parallel_size=4)
    assert split.ray_resources(GPU, 1) == {"num_cpus": 1.0, "num_gpus": 4.0}
    assert split.ray_resources(CPU, 2) == {"num_cpus": 4.0, "num_gpus": 0.0}
    assert split.engine_config(GPU, 1).model.tensor_parallel_size == 4


def test_clients_name_a_model_by_its_served_name() -> None:
    assert parsed(model="a/b").name == "a/b"
    assert parsed(model="a/b", served_model_name="chat").name == "chat"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"models": [{"foo": 1}]}, "models[0].foo = 1 is not allowed: no such setting"),
        (
            {"models": [{"max_num_seqs": 8, "max_num_batched_tokens": 4}]},
            "models[0].max_num_batched_tokens = 4 is not allowed: at least max_num_seqs + 1 = 9",
        ),
        ({"models": [{}, {"watermark": 1.5}]}, "models[1].watermark = 1.5 is not allowed: it must be less than 1"),
        ({"models": [{"watermark": float("nan")}]}, "models[0].watermark = nan is not allowed: a number from 0"),
        (
            {"models": [{"tensor_parallel_size": 0}]},
            "models[0].tensor_parallel_size = 0 is not allowed: it must be at least 1",
        ),
        (
            {"models": [{"tensor_parallel_size": 2, "num_gpus": 1}]},
            "models[0].num_gpus = 1.0 is not allowed: with tensor_parallel_size = 2 only as many, one for each shard",
        ),
        (
            {"models": [{"tensor_parallel_size": 2, "batch_invariant": True}]},
            "models[0].batch_invariant = True is not allowed: only with tensor_parallel_size = 1",
        ),
        ({"models": [{"replicas": 0}]}, "models[0].replicas = 0 is not allowed: it must be at least 1"),
        ({"models": [{}, {}]}, "models[1].served_model_name = 'embedded' is not allowed: one name a model on route /"),
        ({"metrics_port_range": "9100-9100"}, "metrics_port_range = '9100-9100' is not allowed: at least 2 ports"),
        ({"metrics_port_range": "9100-12000"}, "metrics_port_range = '9100-12000' is not allowed: LOW-HIGH"),
        ({"metrics_port_range": "9200-9100"}, "metrics_port_range = '9200-9100' is not allowed: LOW-HIGH"),
        ({"ingress": {"max_body_bytes": "big"}}, "ingress.max_body_bytes = 'big' is not allowed: a valid integer"),
        ({"router": {"kv_headroom": -1}}, "router.kv_headroom = -1 is not allowed: it must be at least 0"),
        (
            {"router": {"cost_s": 0}},
            "is not allowed: at least one weight above 0",
        ),
        ({"router": {"queue_depth": 100.5}}, "router.queue_depth = 100.5 is not allowed: it must be at most 100"),
        (
            {"models": [{"enable_prefix_caching": False}], "router": {"cost_s": 0, "prefix_affinity": 1}},
            "models[0].enable_prefix_caching = False is not allowed: prefix_affinity is the only weight",
        ),
        (["a list"], "config = ['a list'] is not allowed: it must be a mapping"),
        ({"models": []}, "models = [] is not allowed: at least one model"),
        ({"models": [{"model": ""}]}, "models[0].model = '' is not allowed: it must not be empty"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(args: object, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        AppConfig.parse(args)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_the_same_name_may_live_under_two_routes() -> None:
    config = AppConfig.parse({"models": [{}, {"route": "/other"}]})
    assert [model.route for model in config.models] == ["/", "/other"]


@pytest.mark.parametrize("route", ["", "other", "/other/", "//", "/a b", "/a/../b"])
def test_a_route_that_is_no_plain_prefix_is_refused(route: str) -> None:
    with pytest.raises(SettingError, match=r"models\[0\]\.route"):
        AppConfig.parse({"models": [{"route": route}]})


def test_a_file_written_from_a_configuration_reads_back_as_the_same(tmp_path: Path) -> None:
    config = ServeConfig.model_validate(
        {
            "http": {"port": 8123},
            "proxy_location": "HeadOnly",
            "app": {"models": [{"replicas": 2, "max_num_seqs": 8}], "router": {"queue_depth": 3}},
        }
    )
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config.to_serve_file()))
    assert load_serve_config(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: []", "applications[0] = None is not allowed: it must be set"),
        ("applications: [{import_path: 'other:app'}]", "applications[0].import_path = 'other:app' is not allowed"),
        (
            "applications: [{import_path: 'deployments.app:build', name: other}]",
            "applications[0].name = 'other' is not allowed: only 'brimful' is supported",
        ),
        (
            "applications: [{import_path: 'deployments.app:build', runtime_env: {}}]",
            "applications[0].runtime_env = {} is not allowed: no such setting",
        ),
        (
            "applications: [{import_path: 'deployments.app:build', args: {models: [{replicas: none}]}}]",
            "applications[0].args.models[0].replicas = 'none' is not allowed",
        ),
        ("applications: [}", "serve.yaml' is not allowed: a readable YAML file (while parsing a flow node"),
        ("", "serve.yaml' is not allowed: the file must be a mapping with http_options and applications; it is empty"),
        ("just words", "serve.yaml' is not allowed: the file must be a mapping"),
        ("http_options: {port: 99999}\napplications: []", "http_options.port = 99999 is not allowed"),
    ],
)
def test_a_bad_file_is_refused_with_the_path_of_the_setting(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        load_serve_config(path)
    assert message in caught.value.message
    assert "unicode string" not in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"missing\.yaml.*No such file"):
        load_serve_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize("path", sorted(Path("deployments/configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_serve_config(path)
