"""One load under several settings, row by row.

Rows that begin with the same settings share one engine: what a running replica may change is changed live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from bench.simulate.requests import QUEUE_WITHOUT_BOUNDS
from bench.story.measures import Summary, summary
from bench.story.replay import OpenEngine, replay
from bench.traces.trace import Trace
from replica.config import EngineConfig, ModelConfig, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """A row: what its engine starts with beyond the study's base, and what is changed on it before the play."""

    label: str
    start: dict[str, Any] = field(default_factory=dict)
    live: dict[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnobStudy:
    """`name` of the setting that is turned; `base` and `model` are what all rows share."""

    name: str
    trace: Trace
    base: SchedulerConfig
    model: ModelConfig
    rows: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class KnobRow:
    label: str
    result: Summary


@dataclass(frozen=True, slots=True)
class PlayedStudy:
    """A study's rows, and the first one played again after all others, where chance must be told from effect."""

    rows: list[KnobRow]
    again: KnobRow | None


def play_study(
    open_engine: OpenEngine, study: KnobStudy, progress: Callable[[str], None], *, first_again: bool
) -> PlayedStudy:
    """Rows in order."""
    settings = [*study.rows, replace(study.rows[0], label=f"{study.rows[0].label}, again")]
    played: list[KnobRow] = []
    for _, group in groupby(settings if first_again else settings[:-1], key=lambda row: row.start):
        same_start = list(group)
        config = EngineConfig(model=study.model, scheduler=replace(study.base, **same_start[0].start))
        with open_engine(config) as engine:
            for row in same_start:
                found = replay(engine, study.trace, progress, f"{study.name}, {row.label}", row.live)
                played.append(KnobRow(row.label, summary(found)))
    again = played.pop() if first_again else None
    return PlayedStudy(played, again)


def unbounded_queue(**settings: Any) -> SchedulerConfig:
    """Nobody is refused or expires, no prompt is shared: only the settings given make a difference."""
    return SchedulerConfig(
        enable_prefix_caching=False,
        **QUEUE_WITHOUT_BOUNDS,
        **settings,
    )
