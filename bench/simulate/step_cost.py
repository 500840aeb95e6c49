"""How long a step takes: a linear model of what a plan asks the device to do.

    seconds = fixed + prefill tokens * a + decode sequences * b + KV tokens read * c + prefill pairs * d

A row of one token is a decode row, whatever it is for: it reads its whole context for one token. All other rows are
prefill rows: their tokens pass the linear layers, and each attends to everything before it (a pair is one query token
and one key token).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from replica.errors import SettingError
from replica.scheduler.plan import StepPlan


class StepWork(NamedTuple):
    """What one step computes. `num_kv_tokens_read`: the decode rows' context lengths, summed. `num_prefill_pairs`: over
    the prefill rows, chunk * (start + chunk / 2)."""

    num_prefill_tokens: int
    num_decode_seqs: int
    num_kv_tokens_read: int
    num_prefill_pairs: float


def work_of(plan: StepPlan, kv_granule_tokens: int = 1) -> StepWork:
    """The work of a plan; O(rows), at C speed where all rows are decodes and the granule is 1. A decode row reads whole
    granules of KV tokens."""
    num_rows, starts, granule = len(plan.starts), plan.starts, kv_granule_tokens
    chunks: list[tuple[int, int]] = []
    if len(plan.token_ids) != num_rows:
        chunks = [(start, chunk) for start, chunk in zip(starts, plan.num_tokens, strict=True) if chunk != 1]
    num_decodes = num_rows - len(chunks)
    if granule == 1:
        num_read = sum(starts) - sum([start for start, _ in chunks]) + num_decodes
    else:
        read = [start // granule + 1 for start in starts]
        num_read = granule * (sum(read) - sum([start // granule + 1 for start, _ in chunks]))
    if not chunks:
        return StepWork(0, num_decodes, num_read, 0.0)
    pairs = sum([chunk * (start + chunk / 2) for start, chunk in chunks])
    return StepWork(sum([chunk for _, chunk in chunks]), num_decodes, num_read, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step and of each unit of its work, none negative. `kv_granule_tokens`: a decode row reads its
    context in whole pieces of so many tokens. `name` is for tables; `source` says where the numbers come from."""

    fixed_s: float
    prefill_token_s: float
    decode_seq_s: float
    kv_token_s: float
    prefill_pair_s: float
    kv_granule_tokens: int = 1
    name: str = "unnamed"
    source: str = ""

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise SettingError(f"cost.{name}", value, "a finite number of seconds, 0 or more")
        granule = self.kv_granule_tokens
        if isinstance(granule, bool) or not isinstance(granule, int) or granule < 1:
            raise SettingError("cost.kv_granule_tokens", granule, "a whole number of tokens, at least 1")
        if not self.fixed_s > 0:
            raise SettingError("cost.fixed_s", self.fixed_s, "more than 0 seconds: no step is free")

    def seconds(self, work: StepWork) -> float:
        num_prefill, num_decodes, num_read, num_pairs = work
        seconds = self.fixed_s + self.decode_seq_s * num_decodes + self.kv_token_s * num_read
        if num_prefill:
            seconds += self.prefill_token_s * num_prefill + self.prefill_pair_s * num_pairs
        return seconds

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds of a planned step."""
        return self.seconds(work_of(plan, self.kv_granule_tokens))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


_SECONDS = ("fixed_s", "prefill_token_s", "decode_seq_s", "kv_token_s", "prefill_pair_s")

H100_8B = StepCost(
    fixed_s=7.0e-3,
    prefill_token_s=27e-6,
    decode_seq_s=5e-6,
    kv_token_s=49e-9,
    prefill_pair_s=1.06e-9,
    name="h100-8b",
    source="assumed, not measured: Llama-3.1-8B in bfloat16 on one H100 SXM at 80 % of 3.35 TB/s (16 GB of weights a "
    "step, 131 kB of KV a token) and 60 % of 989 TFLOP/s (16 GFLOP a token; attention at 50 %), 1 ms of launches",
)


def load_cost(name_or_path: str) -> StepCost:
    """A preset by name, or a JSON file as `StepCost.save` writes it. Raises `SettingError`."""
    folder = Path(__file__).parent / "costs"
    if name_or_path == H100_8B.name:
        return H100_8B
    preset = folder / f"{name_or_path}.json"
    path = preset if preset.parent == folder and preset.is_file() else Path(name_or_path)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        presets = ", ".join(preset_names())
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise SettingError("cost", name_or_path, f"a preset ({presets}) or a cost file ({reason})") from None
    known = {field.name for field in fields(StepCost)}
    if not isinstance(given, dict) or not set(_SECONDS) <= set(given) <= known:
        raise SettingError("cost", name_or_path, f"the file must be one JSON object with {', '.join(_SECONDS)}")
    return StepCost(**given)


def preset_names() -> list[str]:
    """All names that `load_cost` knows."""
    files = (Path(__file__).parent / "costs").glob("*.json")
    return [H100_8B.name, *sorted(path.stem for path in files)]
