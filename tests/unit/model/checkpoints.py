"""A complete small checkpoint on disk, as a model's makers would publish it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.model.tiny_models import make_model

_WORDS = ["<unk>", "<s>", "</s>", "<end>", *(f"w{number}" for number in range(124))]


def save_checkpoint(folder: Path, *, family: str = "llama", generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_model(family).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "<end>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "LICENSE").write_text("free")
    return folder
