"""Reads a profile of steps (`replica/model/step_profile.py` writes it) and tells where the time of a step goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.engine_speed.rows import PREFILL, Row
from replica.model_card import TextBundle
from replica.request import FinishReason, GenerationRequest, SamplingParams
from replica.stream import Answer
from replica.text.tokenizer import Tokenizer

OUTSIDE = ("plan", "commit", "loop", "inputs", "sampling", "detokenising")
FORWARD = (
    *("embedding", "norm", "qkv", "rope", "before attention", "kv write", "attention", "o", "mlp", "after attention"),
    *("lm_head", "other"),
)
PROFILED = (Row(1, 32, 64), Row(8, 128, 64), Row(64, 128, 128), PREFILL)


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps that are alike, and the mean seconds that each part took in one of them."""

    name: str
    num_rows: int
    num_steps: int
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def outside_share(self) -> float:
        """Of a step's time, what isn't the forward."""
        return sum(self.parts.get(part, 0.0) for part in OUTSIDE) / self.seconds


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Of a written profile, without those that hold a pause."""
    steps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
    return [step for step in steps if not step["idle"]]


def kinds(steps: Sequence[dict[str, Any]], detokenise_s: float) -> list[StepKind]:
    """Decodes of every profiled width, then full prefill steps. `detokenise_s`: of one token, added for each row that
    decodes; it happens in another process, but on the same cores."""
    found = []
    for row in PROFILED:
        if row.is_prefill:
            most = max((step["num_tokens"] for step in steps), default=0)
            alike = [step for step in steps if step["num_tokens"] == most and step["num_rows"] < most]
            name, num_texts = f"{most} tokens of prefill", 0
        else:
            alike = [step for step in steps if step["num_tokens"] == step["num_rows"] == row.num_seqs]
            name, num_texts = f"{row.num_seqs} decodes", row.num_seqs
        if alike:
            parts = {part: fmean(step["parts"].get(part, 0.0) for step in alike) for part in (*FORWARD, *OUTSIDE)}
            parts["detokenising"] = num_texts * detokenise_s
            found.append(StepKind(name, num_texts, len(alike), parts))
    return found


def outside_share(found: Sequence[StepKind], num_rows: int) -> float | None:
    return next((kind.outside_share for kind in found if kind.num_rows == num_rows), None)


def profile_table(found: Sequence[StepKind]) -> list[str]:
    """Milliseconds of a step by part, and their share; of parts that take time in one of them."""
    heads = " | ".join(f"{kind.name} ({kind.num_steps} steps)" for kind in found)
    lines = [f"| part of a step, ms | {heads} |", "|---|" + "---|" * len(found)]
    for part in (part for part in (*FORWARD, *OUTSIDE) if any(kind.parts[part] for kind in found)):
        cells = [f"{kind.parts[part] * 1e3:.2f} ({kind.parts[part] / kind.seconds:.1%})" for kind in found]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    for name, of in (("all", lambda kind: f"{kind.seconds * 1e3:.2f}"), ("outside", _outside)):
        lines.append(f"| **{name}** | {' | '.join(map(of, found))} |")
    return lines


def _outside(kind: StepKind) -> str:
    return f"{kind.outside_share * kind.seconds * 1e3:.2f} ({kind.outside_share:.1%})"


def profile_json(found: Sequence[StepKind]) -> list[dict[str, Any]]:
    return [
        {
            "step": kind.name,
            "num_steps": kind.num_steps,
            "ms": round(kind.seconds * 1e3, 3),
            "outside_share": round(kind.outside_share, 4),
            "parts_ms": {part: round(seconds * 1e3, 3) for part, seconds in kind.parts.items()},
        }
        for kind in found
    ]


def detokenise_s(folder: Path, outputs: Sequence[Sequence[int]], clock: Callable[[], float]) -> float:
    """Seconds that a token takes to become text, as a replica does it: one token of every answer in turn, taken at
    once. `clock` counts seconds of this thread."""
    bundle = TextBundle.load(folder)
    tokenizer = Tokenizer(bundle.tokenizer_json, bundle.card)
    length = min(map(len, outputs))
    sampling = SamplingParams(max_tokens=length, ignore_eos=True)
    answers = [Answer(0, GenerationRequest(str(number), (1,), sampling), tokenizer) for number in range(len(outputs))]
    began = clock()
    for place in range(length):
        reason = FinishReason.LENGTH if place == length - 1 else None
        for answer, output in zip(answers, outputs, strict=True):
            answer.push(output[place], reason)
            answer.take()
    return (clock() - began) / (length * len(outputs))
