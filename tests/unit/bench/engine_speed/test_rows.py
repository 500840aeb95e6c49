"""Workloads: names, prompts that never repeat."""

from __future__ import annotations

import pytest

from bench.engine_speed.rows import PREFILL, ROWS, Row, parse_row, prompts


def test_the_rows_are_those_of_the_goals() -> None:
    assert [str(row) for row in ROWS] == [
        *("1 x 32/64", "8 x 128/64", "32 x 128/128", "64 x 128/128", "16 x 1024/16", "8 x 1024/1"),
    ]
    assert [row for row in ROWS if row.is_prefill] == [PREFILL]


@pytest.mark.parametrize("text", ["8x128/64", " 8 x 128 / 64"])
def test_a_row_is_read_as_it_is_written(text: str) -> None:
    assert parse_row(text) == Row(8, 128, 64)


@pytest.mark.parametrize("text", ["", "8", "8x128", "8x128/", "0x1/1", "1x-1/1", "axb/c"])
def test_what_is_no_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_row(text)


def test_prompts_are_the_same_for_all_sides_and_new_in_every_round() -> None:
    row = Row(3, 40, 1)
    assert prompts(row, 1000, 0) == prompts(row, 1000, 0)
    every = [tuple(prompt[:8]) for number in range(3) for prompt in prompts(row, 1000, number)]
    assert len(set(every)) == 9
    assert [len(prompt) for prompt in prompts(row, 1000, 5)] == [40, 40, 40]
