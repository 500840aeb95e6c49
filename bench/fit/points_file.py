"""Measured points as a JSON file: what was measured where, so that it can be fitted again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.fit.micro import Point
from bench.simulate.json_file import read_json, write_whole
from bench.simulate.step_cost import MAX_SECONDS, MAX_TOKENS, StepWork
from replica.errors import SettingError

MIN_SECONDS = 1e-9
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class PointsFile:
    """`source` says on what model, machine and settings; `kv_granule_tokens` is the KV block size there; `device`
    is `cpu`, `cuda` or, in older files, not known ("")."""

    source: str
    kv_granule_tokens: int
    points: tuple[Point, ...]
    device: str = ""

    def save(self, path: Path) -> None:
        rows = [
            {
                "benchmark": point.benchmark,
                **point.work._asdict(),
                "n": point.num_samples,
                "seconds": point.seconds,
                "noise": point.noise,
            }
            for point in self.points
        ]
        lines = ",\n    ".join(json.dumps(row) for row in rows)
        about = {"source": self.source, "kv_granule_tokens": self.kv_granule_tokens, "device": self.device}
        head = json.dumps(about)[:-1]
        write_whole(path, f'{head}, "points": [\n    {lines}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> PointsFile:
        """Raises `SettingError` for what `save` didn't write."""
        try:
            given = read_json(path)
        except ValueError as error:
            raise SettingError("points", str(path), f"a file of measured points ({error})") from None
        try:
            points = tuple(_point(row) for row in given["points"])
            granule = _within(int(given["kv_granule_tokens"]), 1, MAX_TOKENS)
            return cls(str(given["source"]), granule, points, str(given.get("device", "")))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise SettingError("points", str(path), "a file of measured points, as simulate fit writes it") from None


def _point(row: dict[str, Any]) -> Point:
    """Raises `ValueError` or `OverflowError`: a step takes time and has no negative work, and neither is endless."""
    names = [name for name in StepWork._fields if name != "num_prefill_pairs"]
    counts = {name: _within(int(row[name]), 0, MAX_TOKENS) for name in names}
    work = StepWork(num_prefill_pairs=_within(float(row["num_prefill_pairs"]), 0.0, MAX_TOKENS**2), **counts)
    seconds = _within(float(row["seconds"]), MIN_SECONDS, MAX_SECONDS)
    noise = _within(float(row.get("noise", 0.0)), 0.0, MAX_SECONDS)
    return Point(str(row["benchmark"]), work, _within(int(row["n"]), 1, MAX_TOKENS), seconds, noise)


def _within(value: Number, least: float, most: float) -> Number:
    if not least <= value <= most:
        raise ValueError(f"{value} isn't from {least} to {most}")
    return value


def listed(points: Sequence[Point]) -> str:
    """How many points of how many steps."""
    return f"{len(points)} points from {sum(point.num_samples for point in points)} steps"
