"""Preparing a model: what the card says, when work is done again, and one clear line for everything that can't work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from replica.config import ModelConfig
from replica.errors import ModelNotFound, ModelUnsupported, SettingError, StartupError
from replica.model.api import Progress
from replica.model.fetch import check_sha256
from replica.model.prepare import main, prepare
from replica.model_card import ModelCard, TextBundle
from tests.unit.model.checkpoints import save_checkpoint


def _prepare(source: Path | str, cache: Path, **settings: str) -> tuple[ModelCard, list[str]]:
    said: list[str] = []
    card = prepare(ModelConfig(model=str(source), **settings), cache_dir=cache, progress=said.append)  # type: ignore[arg-type]
    return card, said


def test_a_folders_card_says_what_its_files_say(tmp_path: Path) -> None:
    generation = {"eos_token_id": [9, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    source = save_checkpoint(tmp_path / "my-model", generation=generation)
    card, _ = _prepare(source, tmp_path / "cache")
    assert card.name == "my-model"
    assert card.weights_dir == str(source)
    assert card.eos_token_ids == (9, 2, 3)  # generation config, then config (2), then the tokenizer's <end>
    assert (card.default_temperature, card.default_top_p, card.default_top_k) == (0.6, 0.9, 40)
    assert (card.vocab_size, card.max_position) == (128, 256)
    assert card.chat_template == "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert card.special_tokens == {"bos_token": "<s>", "eos_token": "<end>", "unk_token": "<unk>"}
    assert TextBundle.load(Path(card.folder)).card == card
    tokenizer = Tokenizer.from_file(str(Path(card.folder) / "tokenizer.json"))
    assert tokenizer.encode("w0 </s> w3").ids == [4, 2, 7]
    assert (Path(card.folder) / "LICENSE").read_text() == "free"


def test_of_licences_only_those_that_are_files_are_copied(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model")
    (source / "LICENSES").mkdir()
    (source / "LICENSE-gone").symlink_to("nowhere")
    card, _ = _prepare(source, tmp_path / "cache")
    assert sorted(file.name for file in Path(card.folder).glob("LICENSE*")) == ["LICENSE"]


def test_a_home_folder_in_the_download_dir_is_found_for_the_hub_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []

    def fetch_hub(model: str, revision: str | None, cache_dir: Path | None, *, progress: Progress) -> Path:
        asked.append(cache_dir)
        return save_checkpoint(tmp_path / "snapshot")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("replica.model.prepare.fetch_hub", fetch_hub)
    config = ModelConfig(model="someone/some-model", download_dir="~/models")
    card = prepare(config, progress=lambda _: None)
    assert asked == [tmp_path / "models" / "hub"]
    assert Path(card.folder).parent == tmp_path / "models" / "models"


def test_without_a_generation_config_the_defaults_are_neutral(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "m")
    (source / "generation_config.json").unlink()
    card, _ = _prepare(source, tmp_path / "cache")
    assert (card.default_temperature, card.default_top_p, card.default_top_k) == (1.0, 1.0, 0)
    assert card.eos_token_ids == (2, 3)


def test_a_second_preparation_does_nothing_until_a_file_changes(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "m")
    first, said = _prepare(source, tmp_path / "cache")
    assert any("writing the card" in line for line in said)
    again, said = _prepare(source, tmp_path / "cache")
    assert (again, said) == (first, [])
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    changed, _ = _prepare(source, tmp_path / "cache")
    assert changed.default_temperature == 0.5


def test_a_folder_that_lost_a_file_is_prepared_again(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "m")
    card, _ = _prepare(source, tmp_path / "cache")
    (Path(card.folder) / "tokenizer.json").unlink()
    _prepare(source, tmp_path / "cache")
    assert (Path(card.folder) / "tokenizer.json").is_file()
    (Path(card.folder) / "brimful.json").write_text("{")
    assert _prepare(source, tmp_path / "cache")[0] == card


def test_an_explicit_template_wins_and_travels_with_the_folder(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "m")
    plain, _ = _prepare(source, tmp_path / "cache")
    inline, _ = _prepare(source, tmp_path / "cache", chat_template="{{ messages }}")
    file = tmp_path / "chat.jinja"
    file.write_text("{{ other }}")
    from_file, _ = _prepare(source, tmp_path / "cache", chat_template=str(file))
    assert (inline.chat_template, from_file.chat_template) == ("{{ messages }}", "{{ other }}")
    assert TextBundle.load(Path(inline.folder)).card.chat_template == "{{ messages }}"
    assert TextBundle.load(Path(plain.folder)).card.chat_template == plain.chat_template
    assert inline.weights_dir == plain.weights_dir


def test_what_cannot_work_says_what_to_do(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    empty = tmp_path / "empty"
    empty.mkdir()
    bloom = tmp_path / "bloom"
    bloom.mkdir()
    (bloom / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    bytewise = save_checkpoint(tmp_path / "bytewise")
    (bytewise / "tokenizer.json").unlink()
    (bytewise / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    wild = save_checkpoint(tmp_path / "wild", generation={"top_p": 7})
    cases: list[tuple[Path | str, type[StartupError], str]] = [
        (tmp_path / "missing", ModelNotFound, "there is no model folder"),
        ("./missing", ModelNotFound, "there is no model folder"),
        (tmp_path / "missing.gguf", ModelNotFound, "there is no file"),
        (empty, ModelNotFound, "no config.json"),
        (bloom, ModelUnsupported, "bloom can't be served"),
        (unknown, ModelUnsupported, "transformers can't load"),
        (bytewise, ModelUnsupported, "no fast tokenizer"),
        (wild, ModelUnsupported, "top_p = 7, which is not from 0.0 to 1.0"),
    ]
    for source, kind, line in cases:
        with pytest.raises(kind, match=line) as caught:
            _prepare(source, cache)
        assert "\n" not in caught.value.message
    with pytest.raises(SettingError, match="chat_template"):
        _prepare(save_checkpoint(tmp_path / "m"), cache, chat_template=str(tmp_path / "no.jinja"))
    assert not [path for path in (cache / "models").iterdir() if "tmp" in path.name]


def test_a_folder_without_a_model_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stages: list[str] = []
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        prepare(ModelConfig(str(tmp_path / "empty")), cache_dir=tmp_path / "cache", progress=stages.append)
    assert stages == []


def test_a_file_that_was_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wheel"
    file.write_bytes(b"abc")
    check_sha256(file, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(ModelNotFound, match="wheel was changed on its way here"):
        check_sha256(file, "00")


def test_the_command_prints_the_card_last_and_progress_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_checkpoint(tmp_path / "m")
    capsys.readouterr()
    assert main(["--model", str(source), "--download-dir", str(tmp_path / "cache")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["name"] == "m"
    assert "5/5 writing the card" in err.splitlines()
    assert main(["--model", str(tmp_path / "missing")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: there is no model folder {tmp_path / 'missing'}; check --model\n")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("embedded", "can't fetch the embedded model"),
        ("someone/some-model", "the hub can't be reached"),
        ("not a/valid/id", "is neither a folder here nor on the hub"),
    ],
)
def test_no_network_is_one_clear_line(model: str, line: str, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    environment = {
        **os.environ,
        "PIP_INDEX_URL": f"{nowhere}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "HF_ENDPOINT": nowhere,
        "HF_HOME": str(tmp_path / "hub"),
    }
    command = [sys.executable, "-m", "replica.model.prepare", "--model", model, "--download-dir", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert line in run.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_embedded_model_is_made_from_nothing(tmp_path: Path) -> None:
    card, said = _prepare("embedded", tmp_path)
    folder = Path(card.folder)
    assert card.name == "smollm2-135m-instruct"
    assert (folder / "model.safetensors").stat().st_size > 500_000_000
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert card.eos_token_ids == (2,)
    assert card.chat_template is not None and "<|im_start|>" in card.chat_template
    assert any(line.startswith("3/5 converting weights to float32 safetensors, ") for line in said)
    assert sorted(path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")) == [folder.name]
    shutil.rmtree(folder)
