"""Flags of `brimful serve` and the configuration tree are one thing."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from deployments.cli.flags import serve_config, setting_parameters
from deployments.config import AppConfig, HttpSettings, ModelSettings
from replica.errors import BrimfulError, SettingError


def help_of(name: str) -> str:
    parameter = next(p for p in setting_parameters() if p.name == name)
    return str(parameter.default.help)


def test_every_setting_of_a_model_and_of_the_service_is_a_flag() -> None:
    expected = [*ModelSettings.model_fields, *HttpSettings.model_fields]
    expected += ["metrics_port_range", "metrics_host", "drain_timeout_s"]
    assert [p.name for p in setting_parameters()] == expected


def test_every_flag_has_a_help_text_with_its_default_or_how_it_is_derived() -> None:
    optional = {"revision"}  # nothing is the default, and nothing is derived
    without = [p.name for p in setting_parameters() if "[" not in p.default.help]
    assert set(without) <= optional


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", "'embedded', a hub id, a folder or a .gguf file [default: embedded]"),
        ("port", "port of the HTTP API [default: 8000]"),
        ("dtype", "auto: by device (auto, float32, bfloat16, float16) [default: auto]"),
        ("watermark", "share of KV blocks kept free when admitting [default: 0.01]"),
        ("drain_timeout_s", "a stopping replica lets streams finish for, seconds [default: 30.0]"),
    ],
)
def test_help_shows_meaning_unit_choices_and_default(name: str, text: str) -> None:
    assert help_of(name) == text


def test_a_flag_that_is_not_given_leaves_no_trace() -> None:
    assert serve_config(None, {}).app == AppConfig()
    assert {p.default.default for p in setting_parameters()} == {None}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in setting_parameters())


def test_flags_end_in_the_tree() -> None:
    given = {"max_num_seqs": 3, "replicas": 2, "port": 8301, "host": "0.0.0.0", "drain_timeout_s": 5.0}
    config = serve_config(None, given)
    assert (config.app.models[0].max_num_seqs, config.app.models[0].replicas) == (3, 2)
    assert (config.http.host, config.http.port, config.app.drain_timeout_s) == ("0.0.0.0", 8301, 5.0)


def test_flags_are_put_over_the_file(tmp_path: Path) -> None:
    file = write_file(tmp_path, "{models: [{model: embedded, max_num_seqs: 4, replicas: 2}]}")
    config = serve_config(file, {"replicas": 3})
    assert (config.app.models[0].max_num_seqs, config.app.models[0].replicas) == (4, 3)


def test_a_model_flag_beside_a_file_of_several_models_is_refused_by_name(tmp_path: Path) -> None:
    file = write_file(tmp_path, "{models: [{served_model_name: a}, {served_model_name: b}]}")
    with pytest.raises(SettingError, match=r"^--dtype = 'float32' is not allowed: .* holds several models"):
        serve_config(file, {"dtype": "float32"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 0}, "--max-model-len = 0 is not allowed: it must be at least 1"),
        ({"port": 0}, "--port = 0 is not allowed: it must be at least 1"),
        (
            {"max_num_seqs": 10, "max_num_batched_tokens": 5},
            "--max-num-batched-tokens = 5 is not allowed: at least max_num_seqs + 1 = 11",
        ),
    ],
)
def test_an_error_names_the_flag(given: dict[str, object], message: str) -> None:
    with pytest.raises(BrimfulError) as caught:
        serve_config(None, given)
    assert caught.value.message == message


def test_an_error_of_the_file_names_the_path_in_the_file(tmp_path: Path) -> None:
    file = write_file(tmp_path, "{models: [{max_model_len: 0}]}")
    with pytest.raises(SettingError, match=r"^applications\[0\]\.args\.models\[0\]\.max_model_len = 0"):
        serve_config(file, {"port": 8301})


def test_files_named_by_a_flag_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    config = serve_config(None, {"model": "my-model"})
    assert config.app.models[0].model == str(tmp_path / "my-model")
    assert serve_config(None, {"model": "org/name"}).app.models[0].model == "org/name"


def write_file(folder: Path, args: str) -> Path:
    file = folder / "serve.yaml"
    file.write_text(f"applications:\n- import_path: deployments.app:build\n  args: {args}\n")
    return file
