"""What a prepared model is, without its weights: all that processes need which never load torch.

Preparing a model (`replica/model/prepare.py`) writes a folder:

    brimful.json      this card
    tokenizer.json    for `replica/text`
    config.json, generation_config.json, *.safetensors or a pointer to where the weights lie (`weights_dir`)
    LICENSE           where the source has one
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from replica.errors import ModelNotFound

CARD_FILE = "brimful.json"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`source` is what the operator named; `folder` is the prepared folder, `weights_dir` where the weights lie.

    `default_temperature`, `_top_p`, `_top_k` come from the model's generation_config.json (its own defaults, used
    when a request says nothing). `eos_token_ids` holds every EOS. `chat_template` is Jinja source or None (then chat
    is refused with a clear error). `vocab_size` bounds token ids that clients may send. `special_tokens` are the
    template's variables (bos_token, ...).
    """

    source: str
    revision: str | None
    name: str
    folder: str
    weights_dir: str
    architecture: str
    max_position: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0

    @classmethod
    def from_json(cls, text: str) -> ModelCard:
        """Raises ValueError, TypeError or KeyError for what is no card."""
        fields = json.loads(text)
        return cls(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})

    def save(self, folder: Path) -> None:
        (folder / CARD_FILE).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ModelCard:
        """Raises `ModelNotFound` when the folder holds no readable card."""
        try:
            return cls.from_json((folder / CARD_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelNotFound(f"{folder} holds no prepared model ({CARD_FILE}: {error})") from error


@dataclass(frozen=True, slots=True)
class TextBundle:
    """What an ingress needs to speak for a model: the card and the tokenizer file's bytes. Travels as one message."""

    card: ModelCard
    tokenizer_json: bytes

    @classmethod
    def load(cls, folder: Path) -> TextBundle:
        card = ModelCard.load(folder)
        try:
            return cls(card, (folder / TOKENIZER_FILE).read_bytes())
        except OSError as error:
            raise ModelNotFound(f"{folder} has no {TOKENIZER_FILE}: {error}") from error
