"""Small tokenizers of the families that models use, built here: byte-level, and SentencePiece with byte fallback."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from replica.model_card import ModelCard
from replica.text.tokenizer import Tokenizer

BOS, EOS, TURN_START, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIALS = [BOS, EOS, TURN_START, TURN_END]
THINK = "<think>"
USER_MARK = "<|user|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.",
    "hello hello world, this is  a text with  double spaces\nand lines\n\nand don't, can't, won't",
    "Příliš žluťoučký kůň úpěl ďábelské ódy, 你好 世界, 😀 emoji",
] * 20


def card(vocab_size: int, chat_template: str | None = CHAT_TEMPLATE) -> ModelCard:
    return ModelCard(
        source="tests",
        revision=None,
        name="tests",
        folder="",
        weights_dir="",
        architecture="none",
        max_position=2048,
        vocab_size=vocab_size,
        eos_token_ids=(1,),
        chat_template=chat_template,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        default_temperature=0.5,
        default_top_p=0.9,
        default_top_k=40,
    )


@cache
def byte_level() -> Tokenizer:
    """GPT-2's and Llama 3's way: text is bytes, a character may be split between tokens."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    raw.train_from_iterator(_CORPUS, trainer)
    raw.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in (THINK, USER_MARK)])
    return _ours(raw)


@cache
def byte_fallback() -> Tokenizer:
    """Llama 2's way: words start with a space marker, characters outside the vocabulary are one token a byte."""
    raw = RawTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIALS, *byte_tokens], limit_alphabet=40, max_token_length=12
    )
    raw.train_from_iterator(_CORPUS[:40], trainer)
    # The byte tokens belong to the vocabulary, not to the added tokens.
    document = raw.to_str()
    return _ours(_keep_added(document, SPECIALS, [THINK, USER_MARK]))


@cache
def metaspace() -> Tokenizer:
    """A Unigram model with Metaspace and byte fallback, as newer SentencePiece conversions have."""
    words = [
        "▁",
        "▁the",
        "▁hello",
        "▁a",
        "e",
        "l",
        "o",
        "h",
        "t",
        "s",
        "n",
        "i",
        "a",
        "r",
        "d",
        "<",
        ">",
        "/",
        "|",
        "_",
    ]
    vocab = [("<unk>", 0.0), *((token, 0.0) for token in SPECIALS)]
    vocab += [(f"<0x{value:02X}>", -9.0) for value in range(256)] + [(word, -3.0) for word in words]
    raw = RawTokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    raw.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in (THINK, USER_MARK)])
    return _ours(raw)


@cache
def normalizing() -> Tokenizer:
    """Byte-level behind NFKC, with control tokens that are matched in the normalized text."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=260, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    raw.add_special_tokens([AddedToken(token, normalized=True, special=True) for token in SPECIALS])
    return _ours(raw)


FAMILIES = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token for each byte, whether or not they make characters."""
    if tokenizer._byte_tokens:
        return [tokenizer._byte_tokens[byte] for byte in raw]
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet for bytes
    others = [byte for byte in range(256) if byte not in itself]
    letters = {byte: chr(byte) for byte in itself} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocab = tokenizer._tokenizer.get_vocab()
    return [vocab[letters[byte]] for byte in raw]


def _keep_added(document: str, specials: list[str], marks: list[str]) -> RawTokenizer:
    fields = json.loads(document)
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in specials]
    raw = RawTokenizer.from_str(json.dumps(fields))
    raw.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    return raw


def _ours(raw: RawTokenizer) -> Tokenizer:
    return Tokenizer(raw.to_str().encode(), card(raw.get_vocab_size()))
