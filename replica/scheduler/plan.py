"""The border between scheduling and the model: `StepPlan` goes in, `StepResult` comes out, both columns.

One object a step with parallel lists, not one object a sequence: building 1,024 small objects costs a
millisecond, columns a tenth. Row i of every per-row column belongs to the same sequence.

A step as the model sees it: the flat token row is the concatenation of all rows' chunks.

    row        0 (decode)  1 (mid-prefill)     2 (prompt's last chunk)
    num_tokens 1           4                   3
    token_ids  [ 7 |       11 12 13 14 |       21 22 23 ]       T = 8
    starts     41          128                 60
    samples    True        False               True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from replica.request import FinishReason, SamplingParams

PENDING_TOKEN = -1
"""In `StepPlan.token_ids`: the token that a step still in flight samples for this sequence (plan made before its
commit): draw number `output_index` - 1. Only ever a row's last token, in a row that samples.
In `StepResult.token_ids`: this row sampled nothing."""


class JoinedSequence(NamedTuple):
    """What the runner must know once about a sequence that takes a lane: told in the plan in which it joins.

    `seed` is final (never None). `num_output_tokens` is how many tokens it already made (before a preemption, or
    elsewhere): the next draw is number `num_output_tokens`.
    """

    seq_id: int
    lane: int
    sampling: SamplingParams
    seed: int
    num_output_tokens: int


@dataclass(slots=True)
class StepPlan:
    """Who computes what in one step. Read-only for everybody, its columns too: plans share them. (Not frozen: that
    would make up half of what a plan of a few rows costs.)

    Per row: `seq_ids`; `lanes` (a running sequence's fixed place, 0 <= lane < max_num_seqs, for tensors that persist
    between steps); `starts` (position of the chunk's first token = tokens whose KV exists); `num_tokens` (chunk
    length >= 1); `block_tables` (live append-only lists: position p lies in block `table[p // block_size]`; only the
    entries that this chunk needs are meaningful now); `samples` (this chunk closes the gap: sample one token from
    its last position); `num_logits` (how many last positions of the chunk need logits: 1 when it samples, 0 when
    not, more in checks at the start); `output_index` (which output token of its sequence the row samples: the number
    of the draw). Per step: `token_ids` (flat, sum of `num_tokens`); `joined` and `left` (lanes taken and given back
    since the last plan; `left` first); `token_masks` (row -> allowed-token bitmask, 1 bit a token, little-endian,
    ceil(vocab / 8) bytes). What a mask allows depends on every token before, so a sequence with masks is left out of
    a plan while its last token is pending: such a row never has a `PENDING_TOKEN`. The split of tokens into
    prefill, decode and recomputed, and the `token_budget` that they were planned under, are what `StepStats` reports.
    """

    step: int
    seq_ids: list[int]
    lanes: list[int]
    starts: list[int]
    num_tokens: list[int]
    block_tables: list[list[int]]
    samples: list[bool]
    num_logits: list[int]
    output_index: list[int]
    token_ids: list[int]
    joined: list[JoinedSequence] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    token_masks: dict[int, bytes] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    token_budget: int = 0

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.seq_ids)

    def select(self, rows: list[int]) -> StepPlan:
        """The same step for some rows only: how a failed step is retried without its suspects.

        `joined` keeps its chosen rows only, so that a sequence whose joining fails is a suspect too; `left` leaves out
        the lanes that other rows retake. Taking a lane twice with the same values is harmless.
        """
        ends = _ends(self.num_tokens)
        others = set(self.seq_ids) - {self.seq_ids[r] for r in rows}
        retaken = {joined.lane for joined in self.joined if joined.seq_id in others}
        return StepPlan(
            step=self.step,
            seq_ids=[self.seq_ids[r] for r in rows],
            lanes=[self.lanes[r] for r in rows],
            starts=[self.starts[r] for r in rows],
            num_tokens=[self.num_tokens[r] for r in rows],
            block_tables=[self.block_tables[r] for r in rows],
            samples=[self.samples[r] for r in rows],
            num_logits=[self.num_logits[r] for r in rows],
            output_index=[self.output_index[r] for r in rows],
            token_ids=[t for r in rows for t in self.token_ids[ends[r] - self.num_tokens[r] : ends[r]]],
            joined=[joined for joined in self.joined if joined.seq_id not in others],
            left=[lane for lane in self.left if lane not in retaken],
            token_masks={i: self.token_masks[r] for i, r in enumerate(rows) if r in self.token_masks},
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model made of a plan. `token_ids[i]` is row i's sampled token or `PENDING_TOKEN`. Its lists pass to the
    scheduler, which plans and reports with them: make new ones each step and change none afterwards.

    `failed_rows` maps a row to an error code of `replica/errors.py` (non-finite logits, a row that fails alone): its
    token is meaningless."""

    step: int
    token_ids: list[int]
    failed_rows: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class StepOutcome:
    """What a commit changed, as columns: for each sequence with news, its new token (or `PENDING_TOKEN` for none)
    and its end.

    `stop_reasons[i]` is the stop token id that matched, None otherwise. Sequences that ended are released already.
    """

    seq_ids: list[int]
    token_ids: list[int]
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | None]
    error_codes: list[str | None]


def _ends(lengths: list[int]) -> list[int]:
    total = 0
    ends = []
    for length in lengths:
        total += length
        ends.append(total)
    return ends
