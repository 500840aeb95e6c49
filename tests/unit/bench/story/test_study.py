"""Knob studies: what differs between rows, on which engines they play, what the sizes of the story show."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from bench.fit.engine import MeasuredEngine
from bench.simulate.step_cost import StepCost
from bench.story.experiment import StorySize, real_size, studies, virtual_engines
from bench.story.knobs import chunked_study, pressure_studies
from bench.story.study import play_study
from replica.config import EngineConfig, SchedulerConfig

CPU_LIKE = StepCost(0.05, 0.002, 0.005, 0.0, 0.0, name="cpu-like")
OPENED = "engine"


def silent(_: str) -> None:
    pass


def recording(opened: list[SchedulerConfig], lines: list[str]) -> Callable[[EngineConfig], object]:
    @contextmanager
    def open_engine(config: EngineConfig) -> Iterator[MeasuredEngine]:
        opened.append(config.scheduler)
        lines.append(OPENED)
        with virtual_engines(CPU_LIKE)(config) as engine:
            yield engine

    return open_engine


def ends(lines: Sequence[str]) -> list[str]:
    return [line.rsplit(":", 1)[0] for line in lines if line == OPENED or line.endswith("24/24")]


def test_rows_that_start_alike_share_an_engine_and_the_first_is_played_again_last() -> None:
    opened: list[SchedulerConfig] = []
    lines: list[str] = []
    study = chunked_study(real_size(0).mix, CPU_LIKE)
    played = play_study(recording(opened, lines), study, lines.append, first_again=True)  # type: ignore[arg-type]
    assert [row.label for row in played.rows] == ["off, budget 256", "on, budget 256", "on, budget 32"]
    assert played.again is not None
    assert (played.again.label, played.again.result) == ("off, budget 256, again", played.rows[0].result)
    assert [config.enable_chunked_prefill for config in opened] == [False, True, False]
    assert ends(lines) == [
        OPENED,
        "chunked prefill, off, budget 256",
        OPENED,
        "chunked prefill, on, budget 256",
        "chunked prefill, on, budget 32",
        OPENED,
        "chunked prefill, off, budget 256, again",
    ]


def test_each_row_changes_one_setting() -> None:
    seqs, watermark = pressure_studies(real_size(0).pressure)
    assert [row.live for row in seqs.rows] == [{"max_num_seqs": num, "watermark": 0.01} for num in (8, 16, 32)]
    assert [row.live for row in watermark.rows] == [{"max_num_seqs": 32, "watermark": w} for w in (0.0, 0.01, 0.05)]
    assert seqs.trace is watermark.trace
    chunked = chunked_study(real_size(0).mix, CPU_LIKE)
    assert sum(tokens > 100 for tokens in chunked.trace.prompt_tokens) / len(chunked.trace) == pytest.approx(
        0.2, abs=0.04
    )


@pytest.mark.parametrize(
    ("size", "pressure_grows"), [(real_size(0), False), (real_size(2), True)], ids=["seed 0", "seed 2"]
)
def test_the_story_in_the_sizes_it_is_told_in(size: StorySize, pressure_grows: bool) -> None:
    """So small a pool is full at 16 places: what 32 add to the pressure is, with seed 0, too little to be shown."""
    open_engine = virtual_engines(CPU_LIKE)
    readings = []
    for study, read in studies(size, CPU_LIKE):
        played = play_study(open_engine, study, silent, first_again=False)
        assert played.again is None
        readings.append(read(played.rows, None))
    assert [reading.shown for reading in readings] == [pressure_grows, True, True]
    assert ("the KV pool is the limit" in readings[0].text) == pressure_grows
    assert "TTFT pays for it" in readings[1].text
    assert "no concurrency is bought" in readings[2].text
