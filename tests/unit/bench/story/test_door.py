from dataclasses import replace

import pytest

from bench.simulate.step_cost import H100_8B
from bench.story.door import Door, read_door
from bench.story.experiment import play_batching, real_size, virtual_engines

SIZE = replace(real_size(0), spreads=("W7",), num_door_batches=20)
SHOWN = Door(2.0, 0.5, 100.0, (1.0, 5.0, 9.0, 12.0), (0.0, 0.1, 3.0, 0.0), 50.0, 98.0)


def test_between_the_two_capacities_only_fixed_batches_leave_a_growing_queue() -> None:
    _, door = play_batching(virtual_engines(H100_8B), SIZE, H100_8B, lambda _: None)
    assert door.load_static == pytest.approx(1 / door.load_continuous)
    assert door.load_static > 1.8
    assert list(door.waiting_static) == sorted(door.waiting_static)
    assert door.waiting_static[-1] > 3 * SIZE.spread.batch_size
    assert max(door.waiting_continuous) < SIZE.spread.batch_size / 2
    assert door.tokens_per_s_static < 0.6 * door.tokens_per_s_asked
    assert door.tokens_per_s_continuous > 0.9 * door.tokens_per_s_asked
    assert read_door(door, SIZE.spread.batch_size).shown


def test_the_reading_has_the_numbers() -> None:
    assert read_door(SHOWN, batch_size=8).text == (
        "work waits and can't get in: waiting behind fixed batches 1.0 -> 5.0 -> 9.0 -> 12.0, 0.0 -> 0.1 -> 3.0 -> 0.0 "
        "behind continuous ones (tokens per second: 50 and 98 of 100 asked)"
    )


@pytest.mark.parametrize(
    "changes",
    [{"waiting_static": (1.0, 5.0, 4.0, 5.0)}, {"waiting_continuous": (0.0, 2.0, 5.0, 9.0)}],
    ids=["fixed batches keep up", "continuous batches don't"],
)
def test_otherwise_it_is_refused(changes: dict[str, tuple[float, ...]]) -> None:
    reading = read_door(replace(SHOWN, **changes), batch_size=8)  # type: ignore[arg-type]
    assert not reading.shown
    assert reading.text.startswith("not shown: waiting behind fixed batches ")
