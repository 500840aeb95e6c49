"""Turns a checkpoint as published into what brimful loads: safetensors, tokenizer.json and the facts of the card.

The only part of preparation that needs torch and transformers; both are imported inside the functions, so that the
other parts stay light.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replica.errors import ModelNotFound, ModelUnsupported, StartupError
from replica.model import checkpoint
from replica.model_card import TOKENIZER_FILE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint says about itself, from its configuration, generation configuration and tokenizer."""

    architecture: str
    max_position: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    temperature: float
    top_p: float
    top_k: int


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's weights as float32 safetensors, with configuration and tokenizer, into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The conversion draws a progress bar that no setting of transformers turns off.
    with quiet_transformers(), redirect_stderr(io.StringIO()), readable_errors(str(gguf)):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain float32 now; a model that still says "quantized" refuses to be saved.
        model.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config._name_or_path = gguf.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def read_checkpoint(weights_dir: Path, folder: Path) -> CheckpointFacts:
    """Write `folder/tokenizer.json` as transformers itself would tokenize, and return the checkpoint's facts.

    Raises `ModelNotFound` for unreadable files and `ModelUnsupported` for a model that can't be served.
    """
    from transformers import AutoTokenizer

    config = read_model_config(weights_dir)
    checkpoint.weight_files(weights_dir)
    with quiet_transformers(), readable_errors(str(weights_dir)):
        tokenizer = AutoTokenizer.from_pretrained(weights_dir, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelUnsupported(f"{weights_dir} has no fast tokenizer; convert it to a tokenizer.json first")
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
    return _facts(config, tokenizer, _generation_config(weights_dir))


def read_model_config(weights_dir: Path) -> PretrainedConfig:
    """The configuration of a model that the static rule lets pass.

    Raises `ModelNotFound` for unreadable files and `ModelUnsupported` for a model that can't be served.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from replica.model.support import require_supported_config

    checkpoint.require_no_own_code(weights_dir, CONFIG_MAPPING.keys())
    with quiet_transformers(), readable_errors(str(weights_dir)):
        config: PretrainedConfig = AutoConfig.from_pretrained(weights_dir, trust_remote_code=False)
        require_supported_config(config)
    return config


def _facts(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> CheckpointFacts:
    text = config.get_text_config()
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL_TOKENS}
    return CheckpointFacts(
        architecture=(config.architectures or [type(config).__name__])[0],
        max_position=_max_position(text),
        vocab_size=int(text.vocab_size),
        eos_token_ids=_eos_token_ids(generation.get("eos_token_id"), text.eos_token_id, tokenizer.eos_token_id),
        chat_template=_chat_template(tokenizer.chat_template),
        special_tokens={name: str(token) for name, token in special.items() if token is not None},
        temperature=_default(generation, "temperature", 1.0, 0.0, 100.0),
        top_p=_default(generation, "top_p", 1.0, 0.0, 1.0),
        top_k=int(_default(generation, "top_k", 0, 0, 2**31)),
    )


def _generation_config(weights_dir: Path) -> dict[str, Any]:
    """The file's own entries: the class would fill in defaults that the model's makers never chose."""
    file = weights_dir / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{file} holds no JSON object")
    return content


def _default(generation: dict[str, Any], name: str, otherwise: float, low: float, high: float) -> float:
    value = generation.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelUnsupported(f"generation_config.json has {name} = {value!r}, which is not from {low} to {high}")
    return float(value)


def _eos_token_ids(*sources: object) -> tuple[int, ...]:
    """Every id that any source names as EOS, each source an int, a list of ints or None; order of first mention."""
    ids: list[int] = []
    for source in sources:
        for token in source if isinstance(source, list | tuple) else [source]:
            if isinstance(token, int) and token >= 0 and token not in ids:
                ids.append(token)
    return tuple(ids)


def _chat_template(template: object) -> str | None:
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _max_position(config: PretrainedConfig) -> int:
    value = getattr(config, "max_position_embeddings", None)
    if not isinstance(value, int) or value < 1:
        raise ModelUnsupported(
            f"{type(config).__name__} names no max_position_embeddings: its context limit is unknown"
        )
    return value


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars and warnings; errors still pass."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def readable_errors(where: str) -> Iterator[None]:
    """transformers raises OSError, ValueError, KeyError, ImportError and more for files that it can't use."""
    try:
        yield
    except (StartupError, MemoryError):
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise ModelNotFound(f"{where} is incomplete: {first_line(error)}") from error
    except Exception as error:
        if "No space left on device" in str(error):
            raise
        raise ModelUnsupported(f"transformers can't load {where}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What a library says, short enough for one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
