"""Measured points as a JSON file: what was measured where, so that it can be fitted again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fit.micro import Point
from bench.simulate.step_cost import StepWork
from replica.errors import SettingError


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
        path.write_text(f'{head}, "points": [\n    {lines}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PointsFile:
        """Raises `SettingError` for what `save` didn't write."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            points = tuple(_point(row) for row in given["points"])
            return cls(str(given["source"]), int(given["kv_granule_tokens"]), points, str(given.get("device", "")))
        except OSError as error:
            raise SettingError("points", str(path), f"a file of measured points ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SettingError("points", str(path), "a file of measured points, as simulate fit writes it") from None


def _point(row: dict[str, Any]) -> Point:
    counts = {name: int(row[name]) for name in StepWork._fields if name != "num_prefill_pairs"}
    work = StepWork(num_prefill_pairs=float(row["num_prefill_pairs"]), **counts)
    seconds = float(row["seconds"])
    if not 0 < seconds < math.inf or min(work) < 0:
        raise ValueError("a step takes time and has no negative work")
    return Point(str(row["benchmark"]), work, int(row["n"]), seconds, float(row.get("noise", 0.0)))


def listed(points: Sequence[Point]) -> str:
    """How many points of how many steps."""
    return f"{len(points)} points from {sum(point.num_samples for point in points)} steps"
