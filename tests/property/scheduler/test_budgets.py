"""Whatever was changed before: the range that is shown for a limit is the range that is taken."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replica.config import SchedulerConfig
from replica.errors import SettingError
from replica.scheduler.budgets import CHANGEABLE, allowed, budgets_of, changed, check_against_model
from tests.property.scheduler.world import shape_of

SHAPE = shape_of(100, 4, max_model_len=20)
COUNTS = st.integers(1, 6)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    chunked = draw(st.booleans())
    threshold = draw(st.integers(0, 6)) if chunked else 0
    partial = draw(st.none() | COUNTS) if chunked else None
    long = draw(st.none() | st.integers(1, partial or 6)) if threshold else None
    seqs = draw(COUNTS)
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(seqs + 1 if chunked else 20, 30)),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.5])),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=partial,
        max_long_partial_prefills=long,
    )


WISHES = st.dictionaries(st.sampled_from(CHANGEABLE), st.none() | st.integers(-1, 31) | st.sampled_from([0.0, 0.25]))


def takes(start: SchedulerConfig, now: SchedulerConfig, name: str, value: Any) -> bool:
    try:
        changed(start, now, {name: value}, SHAPE)
    except SettingError:
        return False
    return True


@given(configs(), st.lists(WISHES, max_size=4))
def test_the_shown_range_is_the_one_that_is_taken(start: SchedulerConfig, wishes: list[dict[str, Any]]) -> None:
    now = start
    for wish in wishes:
        try:
            now = changed(start, now, wish, SHAPE)
        except SettingError:
            continue
        check_against_model(now, SHAPE)
        assert now.max_num_seqs <= start.max_num_seqs
        assert now.max_num_batched_tokens <= start.max_num_batched_tokens
        assert now.watermark <= start.watermark
    assert all(takes(start, now, name, value) for name, value in budgets_of(now).items()), "what is set is in range"
    for name, found in allowed(start, budgets_of(now), SHAPE).items():
        shown = found.as_json()
        for value in (0, 0.25) if name == "watermark" else range(-1, 33):
            low, high = shown["min"], 10**9 if shown["max"] is None else shown["max"]
            assert takes(start, now, name, value) == (low is not None and low <= value <= high)
        assert takes(start, now, name, None) == shown["none"]


@given(configs(), WISHES)
def test_all_limits_can_go_back_to_the_start(start: SchedulerConfig, wish: dict[str, Any]) -> None:
    try:
        now = changed(start, start, wish, SHAPE)
    except SettingError:
        now = start
    assert changed(start, now, budgets_of(start), SHAPE) == start
