"""How long a step takes: a model of what a plan asks the device to do, linear but for one curve.

    seconds = fixed + prefill tokens * a + decode sequences * b + KV tokens read * c + prefill pairs * d + chunks * e
              + curve(all tokens)

A row of one token is a decode row, whatever it is for: it reads its whole context for one token. All other rows are
prefill rows, or chunks: their tokens pass the linear layers, and each attends to everything before it (a pair is one
query token and one key token). The curve is for devices whose matrix products aren't linear in their rows, such as a
CPU, where another kernel takes over at 3 rows; it is 0 unless measured. Where there is one, it holds what a token costs
in the linear layers, and b only what a decode costs beyond that.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from bench.simulate.json_file import read_json, write_whole
from replica.errors import SettingError
from replica.scheduler.plan import StepPlan

MAX_SECONDS, MAX_TOKENS, MAX_TEXT = 1e6, 10**9, 500


class StepWork(NamedTuple):
    """What one step computes. `num_kv_tokens_read`: the decode rows' context lengths, summed. `num_prefill_pairs`: over
    the prefill rows, chunk * (start + chunk / 2). `num_chunks`: prefill rows."""

    num_prefill_tokens: int
    num_decode_seqs: int
    num_kv_tokens_read: int
    num_prefill_pairs: float
    num_chunks: int = 0


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
    return StepWork(sum([chunk for _, chunk in chunks]), num_decodes, num_read, pairs, len(chunks))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step and of each unit of its work, none negative. `kv_granule_tokens`: a decode row reads its
    context in whole pieces of so many tokens. `token_curve`: knots (tokens in the step, seconds), in order of tokens;
    straight lines between, the last line goes on beyond the last knot, and below the first knot it is the first's
    seconds. `name` is for tables; `source` says where the numbers come from. `device`: `cpu` or `cuda`, where it was
    measured; "" in files from before there was this field. `reference_ratio`: how many times as long as this cost says
    the reference steps took when it was fitted; what they take later is compared with that."""

    fixed_s: float
    prefill_token_s: float
    decode_seq_s: float
    kv_token_s: float
    prefill_pair_s: float
    chunk_s: float = 0.0
    kv_granule_tokens: int = 1
    token_curve: tuple[tuple[int, float], ...] = ()
    name: str = "unnamed"
    source: str = ""
    device: str = ""
    reference_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
                raise SettingError(f"cost.{name}", value, f"a number of seconds from 0 to {MAX_SECONDS:g}")
        granule = self.kv_granule_tokens
        if isinstance(granule, bool) or not isinstance(granule, int) or not 1 <= granule <= MAX_TOKENS:
            raise SettingError("cost.kv_granule_tokens", granule, f"a whole number of tokens from 1 to {MAX_TOKENS}")
        for name in ("name", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
                raise SettingError(f"cost.{name}", value, f"one line of at most {MAX_TEXT} characters")
        if not self.fixed_s > 0:
            raise SettingError("cost.fixed_s", self.fixed_s, "more than 0 seconds: no step is free")
        check_curve(self.token_curve)
        if self.device not in ("", "cpu", "cuda"):
            raise SettingError("cost.device", self.device, "cpu or cuda")
        ratio = self.reference_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1e-6 < ratio < 1e6:
            raise SettingError("cost.reference_ratio", ratio, "a number between 0.000001 and 1000000")

    @property
    def kind_of_device(self) -> str:
        """`cpu` or `cuda`; where the file doesn't say, the name does: presets on a CPU begin with cpu."""
        return self.device or ("cpu" if self.name.startswith("cpu") else "cuda")

    def seconds(self, work: StepWork) -> float:
        num_prefill, num_decodes, num_read, num_pairs, num_chunks = work
        seconds = self.fixed_s + self.decode_seq_s * num_decodes + self.kv_token_s * num_read
        if num_prefill:
            seconds += self.prefill_token_s * num_prefill + self.prefill_pair_s * num_pairs + self.chunk_s * num_chunks
        if self.token_curve:
            seconds += on_curve(self.token_curve, num_prefill + num_decodes)
        return seconds

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds of a planned step."""
        return self.seconds(work_of(plan, self.kv_granule_tokens))

    def slowed(self, factor: float, attention: float = 1.0) -> StepCost:
        """Every step takes `factor` times as long, and what grows with the context `attention` times that."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            prefill_token_s=self.prefill_token_s * factor,
            decode_seq_s=self.decode_seq_s * factor,
            kv_token_s=self.kv_token_s * factor * attention,
            prefill_pair_s=self.prefill_pair_s * factor * attention,
            chunk_s=self.chunk_s * factor,
            token_curve=tuple((knot, seconds * factor) for knot, seconds in self.token_curve),
        )

    def save(self, path: Path) -> None:
        """Raises `OSError`, and then a file that was there is as it was."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")


def on_curve(curve: tuple[tuple[int, float], ...], num_tokens: int) -> float:
    """A `token_curve`'s seconds at so many tokens; never negative."""
    if num_tokens <= curve[0][0]:
        return curve[0][1]
    upper = min(bisect_left(curve, num_tokens, key=itemgetter(0)), len(curve) - 1)
    (low, low_s), (high, high_s) = curve[upper - 1], curve[upper]
    return max(0.0, low_s + (high_s - low_s) * (num_tokens - low) / (high - low))


def check_curve(curve: object) -> None:
    """Raises `SettingError` for what is no `token_curve`."""
    allowed = f"none, or at least 2 knots (tokens, seconds), tokens whole and growing, seconds 0 to {MAX_SECONDS:g}"
    if not isinstance(curve, tuple):
        raise SettingError("cost.token_curve", curve, allowed)
    if not all(map(_is_knot, curve)) or len(curve) == 1 or any(low[0] >= high[0] for low, high in pairwise(curve)):
        raise SettingError("cost.token_curve", curve, allowed)


def _is_knot(knot: object) -> bool:
    if not isinstance(knot, tuple) or len(knot) != 2 or type(knot[0]) is not int or not 0 <= knot[0] <= MAX_TOKENS:
        return False
    return type(knot[1]) in (int, float) and 0 <= knot[1] <= MAX_SECONDS


_NEEDED = ("fixed_s", "prefill_token_s", "decode_seq_s", "kv_token_s", "prefill_pair_s")
_SECONDS = (*_NEEDED, "chunk_s")

H100_8B = StepCost(
    fixed_s=7.0e-3,
    prefill_token_s=27e-6,
    decode_seq_s=5e-6,
    kv_token_s=49e-9,
    prefill_pair_s=1.06e-9,
    name="h100-8b",
    device="cuda",
    source="assumed, not measured: Llama-3.1-8B in bfloat16 on one H100 SXM at 80 % of 3.35 TB/s (16 GB of weights a "
    "step, 131 kB of KV a token) and 60 % of 989 TFLOP/s (16 GFLOP a token; attention at 50 %), 1 ms of launches",
)


def load_cost(name_or_path: str) -> StepCost:
    """A preset by name, or a JSON file as `StepCost.save` writes it. Raises `SettingError`."""
    folder = Path(__file__).parent / "costs"
    if name_or_path == H100_8B.name:
        return H100_8B
    path = folder / f"{name_or_path}.json" if name_or_path in preset_names() else Path(name_or_path)
    try:
        given = read_json(path)
    except ValueError as error:
        presets = ", ".join(preset_names())
        raise SettingError("cost", name_or_path, f"a preset ({presets}) or a cost file ({error})") from None
    known = {field.name for field in fields(StepCost)}
    if not isinstance(given, dict) or not set(_NEEDED) <= set(given) <= known:
        raise SettingError("cost", name_or_path, f"the file must be one JSON object with {', '.join(_NEEDED)}")
    return StepCost(**given | {"token_curve": _knots(given.get("token_curve", ()))})


def _knots(given: object) -> Any:
    """JSON's lists as tuples, as far as they are; `check_curve` refuses the rest."""
    if not isinstance(given, list):
        return given
    return tuple(tuple(knot) if isinstance(knot, list) else knot for knot in given)


def preset_names() -> list[str]:
    """All names that `load_cost` knows."""
    files = (Path(__file__).parent / "costs").glob("*.json")
    return [H100_8B.name, *sorted(path.stem for path in files)]
