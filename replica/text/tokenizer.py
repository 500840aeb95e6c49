"""Text to token ids and back, from the bytes of a `tokenizer.json`. Needs `tokenizers` only, never transformers.

One thing is done differently from the plain library. SentencePiece-style decoders turn a run of byte tokens (`<0xF0>`)
into text only if the whole run is valid UTF-8; one stray byte makes replacement characters of its valid neighbours,
even of those that were streamed long ago. `decode` repairs such runs first, byte sequence by byte sequence, as
byte-level tokenizers do. Runs that are valid decode exactly as in the library. So decoded text never changes when
tokens are added, but for a last character that is still incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from replica.errors import ModelUnsupported
from replica.model_card import ModelCard

REPLACEMENT = "\ufffd"

_SHRINKING_SAFE_NORMALIZERS = {"Prepend", "Replace", "NFC"}
_NFC_MAX_SHRINK = 3
"""Composing shortens UTF-8 by at most this factor (three conjoining jamo of 3 bytes each become one syllable)."""


class Tokenizer:
    """One model's tokenizer. Safe to share between threads: nothing changes after construction.

    `vocab_size` is the highest id plus one (a model's logits may be wider). `special_ids` are the ids of tokens marked
    special. `added_tokens` maps every added token's text to its id; `normalizes_added_tokens` says that other spellings
    may be normalized to one of them.
    Raises `ModelUnsupported` when the bytes are no tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, card: ModelCard) -> None:
        try:
            document: dict[str, Any] = json.loads(tokenizer_json)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelUnsupported(f"{card.name}: tokenizer.json can't be read: {error}") from error
        self._json = tokenizer_json
        self._card = card
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_tokens = {token.content: i for i, token in added.items()}
        self._byte_values = self._find_byte_tokens(document)
        self._byte_tokens = {value: i for i, value in self._byte_values.items()}
        self._bytes_per_token = self._bound_bytes_per_token(document, vocab)
        self.normalizes_added_tokens = any(token.normalized for token in added.values()) and bool(
            _types(document.get("normalizer")) - {"Sequence", "Prepend", "Replace"}
        )
        self._drops_whitespace = any(token.lstrip or token.rstrip for token in added.values())

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`. Control tokens written in it are parsed as such (raw prompts may hold them)."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without added BOS or EOS, and for each the (start, end) of the characters of `text` it stands for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def renamed(self, names: Mapping[str, str]) -> Tokenizer:
        """The same tokenizer, in which some tokens have another text: ids and all else stay.

        So a token that got a name which nobody can type can't be produced by typing its old one. Takes up to seconds
        for the largest vocabularies.
        """
        document = json.loads(self._json)
        model = document["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
        else:  # Unigram: pairs of text and score, the id is the place
            model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_merged(merge))]
        for token in document["added_tokens"]:
            if token["content"] in names:
                token.update(content=names[token["content"]], normalized=False)
        document["post_processor"] = None
        return Tokenizer(json.dumps(document).encode(), self._card)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; ids outside the vocabulary have none. Incomplete characters become U+FFFD."""
        return self.decode_visible(self.visible(ids, skip_special_tokens))

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """The ids that `decode` turns into text."""
        size = self.vocab_size
        if not skip_special_tokens:
            return [i for i in ids if 0 <= i < size]
        hidden = self.special_ids
        return [i for i in ids if 0 <= i < size and i not in hidden]

    def decode_visible(self, ids: list[int]) -> str:
        """`decode` of what `visible` returned."""
        values = self._byte_values
        if values and any(i in values for i in ids):
            ids = self._repair_byte_runs(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, in microseconds: refuses absurd lengths unencoded.

        0 where the tokenizer may drop or merge any amount of text, so that no bound holds.
        """
        if not self._bytes_per_token:
            return 0
        num_bytes = len(text.encode("utf-8", "replace"))
        if self._drops_whitespace:
            num_bytes -= sum(len(gap.encode()) for gap in re.findall(r"\s+", text))
        return num_bytes // self._bytes_per_token

    def _repair_byte_runs(self, ids: list[int]) -> list[int]:
        repaired: list[int] = []
        run = bytearray()
        for i in [*ids, -1]:
            value = self._byte_values.get(i)
            if value is not None:
                run.append(value)
                continue
            if run:
                valid = run.decode("utf-8", "replace").encode()
                repaired += [self._byte_tokens[byte] for byte in valid]
                run.clear()
            if i >= 0:
                repaired.append(i)
        return repaired

    def _find_byte_tokens(self, document: dict[str, Any]) -> dict[int, int]:
        """Token id -> byte value, if the decoder falls back to bytes; empty otherwise."""
        if "ByteFallback" not in _types(document.get("decoder")):
            return {}
        ids = {self._tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
        found = {i: value for i, value in ids.items() if i is not None}
        return found if len(found) == 256 else {}

    def _bound_bytes_per_token(self, document: dict[str, Any], vocab: dict[str, int]) -> int:
        """Bytes of text that one token stands for at most; 0 when there is no bound."""
        normalizers = _types(document.get("normalizer"))
        model = document.get("model", {})
        writes_every_byte = bool(self._byte_values) or "ByteLevel" in _types(document.get("pre_tokenizer"))
        if not normalizers - {"Sequence"} <= _SHRINKING_SAFE_NORMALIZERS or not writes_every_byte:
            return 0
        if model.get("type") not in ("BPE", "Unigram") or _replace_drops_text(document.get("normalizer")):
            return 0
        longest = max(len(token.encode("utf-8", "replace")) for token in vocab)
        return longest * (_NFC_MAX_SHRINK if "NFC" in normalizers else 1)


def _merged(merge: str | list[str]) -> tuple[str, str, str]:
    """Both parts and the result of a BPE merge, which files hold as a list or with a space between."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _types(part: Any) -> set[str]:
    """Names of all steps in a (possibly nested) part of tokenizer.json."""
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if not isinstance(part, dict):
        return set()
    own = {str(part["type"])} if "type" in part else set()
    return own.union(*map(_types, part.values()))


def _replace_drops_text(normalizer: Any) -> bool:
    """Whether a Replace step writes less than it reads, for patterns whose length isn't known or is longer."""
    if isinstance(normalizer, list):
        return any(map(_replace_drops_text, normalizer))
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        return pattern is None or len(str(normalizer.get("content", "")).encode()) < len(pattern.encode())
    return any(_replace_drops_text(v) for v in normalizer.values() if isinstance(v, list | dict))
