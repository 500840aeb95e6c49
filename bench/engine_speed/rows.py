"""The workloads: so many sequences at once, so many tokens each. All sides get the same prompts.

Standard library only: drivers in other interpreters, which have nothing of ours, may import this file.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`num_seqs` requests that arrive together, greedy, each making exactly `num_output_tokens`."""

    num_seqs: int
    num_prompt_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.num_prompt_tokens}/{self.num_output_tokens}"

    @property
    def is_prefill(self) -> bool:
        """Prompts alone: the one token of each is its prefill's."""
        return self.num_output_tokens == 1

    @property
    def total_prompt_tokens(self) -> int:
        return self.num_seqs * self.num_prompt_tokens

    @property
    def total_output_tokens(self) -> int:
        return self.num_seqs * self.num_output_tokens


PREFILL = Row(8, 1024, 1)
ROWS = (Row(1, 32, 64), Row(8, 128, 64), Row(32, 128, 128), Row(64, 128, 128), Row(16, 1024, 16), PREFILL)
WARM_UP = Row(4, 32, 8)


def parse_row(text: str) -> Row:
    """`8x128/64`, blanks allowed. Raises ValueError."""
    num_seqs, _, lengths = text.replace(" ", "").partition("x")
    prompt, _, output = lengths.partition("/")
    row = Row(int(num_seqs), int(prompt), int(output))
    if min(row.num_seqs, row.num_prompt_tokens, row.num_output_tokens) < 1:
        raise ValueError(f"{text}: every number is at least 1")
    return row


def prompts(row: Row, vocab_size: int, round_number: int) -> list[list[int]]:
    """Random ids: no two prompts of a run share their beginnings, and every round has new ones."""
    source = random.Random(f"{row} {round_number}")
    return [[source.randrange(vocab_size) for _ in range(row.num_prompt_tokens)] for _ in range(row.num_seqs)]
