"""Every setting of the scheduler has a range that holds in code, in a file, on the command line and live, and every
refusal names the setting, its value and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli.flags import serve_config
from deployments.machine import Machine
from deployments.serve_file import load_serve_config
from replica.config import SchedulerConfig
from replica.errors import BrimfulError, SettingError
from replica.scheduler.budgets import CHANGEABLE, allowed, budgets_of, changed
from tests.property.scheduler.world import shape_of

NOT_WHOLE = ("3", 2.0, True, math.nan, math.inf, [1])
NOT_A_NUMBER = ("3", True, math.nan, math.inf, -math.inf, [1], None)
NOT_A_SWITCH = (1, 0, "true", None, math.nan)
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Case:
    """`good` at the bounds, `bad` beyond them or of another type. `beside`: what must be set for the rest to be so."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    beside: tuple[tuple[str, Any], ...] = ()


THRESHOLD = (("long_prefill_token_threshold", 9),)
SETTINGS = {
    "max_num_seqs": Case((1, 511), (0, -1, 512, *NOT_WHOLE, None), (("max_num_batched_tokens", 512),)),
    "max_num_batched_tokens": Case((65, 10**6), (64, 1, 0, *NOT_WHOLE, None), (("max_num_seqs", 64),)),
    "enable_chunked_prefill": Case((True, False), NOT_A_SWITCH),
    "long_prefill_token_threshold": Case((0, 1, 10**6), (-1, *NOT_WHOLE, None)),
    "max_num_partial_prefills": Case((1, None), (0, -1, *NOT_WHOLE)),
    "max_long_partial_prefills": Case((1, 3, None), (0, 4, *NOT_WHOLE), (*THRESHOLD, ("max_num_partial_prefills", 3))),
    "max_prefill_skip_s": Case((0, 0.5, 1e9), (-TINY, *NOT_A_NUMBER)),
    "kv_bypass_s": Case((0, 0.5, 1e9), (-TINY, *NOT_A_NUMBER)),
    "kv_bypass_blocks": Case((0, 10**6), (-1, *NOT_WHOLE, None)),
    "scheduler_reserve_full_isl": Case((True, False), NOT_A_SWITCH),
    "watermark": Case((0, 0.0, 1 - TINY), (-TINY, 1, 1.0, 2, *NOT_A_NUMBER)),
    "enable_prefix_caching": Case((True, False), NOT_A_SWITCH),
    "policy": Case(("fcfs", "priority"), ("FCFS", "random", "", None, 1, True)),
    "priority_ageing_s": Case((TINY, 1e9), (0, 0.0, -1, *NOT_A_NUMBER)),
    "batching": Case(("continuous", "static"), ("dynamic", "", None, 1, True)),
    "max_num_queued_seqs": Case((1, 10**6), (0, -1, *NOT_WHOLE, None)),
    "max_num_queued_tokens": Case((1, 10**9), (0, -1, *NOT_WHOLE, None)),
    "queue_timeout_s": Case((TINY, 1e9), (0, 0.0, -1, *NOT_A_NUMBER)),
}
GOOD = [(name, value) for name, case in SETTINGS.items() for value in case.good]
BAD = [(name, value) for name, case in SETTINGS.items() for value in case.bad]
# What forbids what: settings, the one that is named, and what the message says about the other.
TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, "max_num_batched_tokens", "at least max_num_seqs + 1 = 9"),
    (
        {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 9, "max_long_partial_prefills": 3},
        "max_long_partial_prefills",
        "at most max_num_partial_prefills = 2",
    ),
    ({"max_long_partial_prefills": 1}, "max_long_partial_prefills", "only with long_prefill_token_threshold"),
    (
        {"enable_chunked_prefill": False, "long_prefill_token_threshold": 9},
        "long_prefill_token_threshold",
        "only with enable_chunked_prefill",
    ),
    (
        {"enable_chunked_prefill": False, "max_num_partial_prefills": 2},
        "max_num_partial_prefills",
        "only with enable_chunked_prefill",
    ),
]


def settings_with(name: str, value: object) -> dict[str, Any]:
    return {**dict(SETTINGS[name].beside), name: value}


def refusal(name: str, value: object) -> str:
    """How every message begins. A limit too high for the other one is told as the other one being too low."""
    if name == "max_num_seqs" and type(value) is int and value > 1:
        return "max_num_batched_tokens = 512 is not allowed: "
    return f"{name} = {value!r} is not allowed: "


def as_file(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "serve.yaml"
    application = {"import_path": "deployments.app:build", "args": {"models": [settings]}}
    path.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    return path


def test_the_table_has_every_setting() -> None:
    assert sorted(SETTINGS) == sorted(field.name for field in fields(SchedulerConfig))


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_at_its_bound_is_taken_in_code_and_from_a_file(name: str, value: object, tmp_path: Path) -> None:
    settings = settings_with(name, value)
    assert getattr(SchedulerConfig(**settings), name) == value
    model = load_serve_config(as_file(tmp_path, settings)).app.models[0]
    assert getattr(model.engine_config(Machine(), 1).scheduler, name) == value


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_beyond_its_bound_or_of_another_type_is_refused_in_code(name: str, value: object) -> None:
    with pytest.raises(SettingError) as caught:
        SchedulerConfig(**settings_with(name, value))
    assert caught.value.message.startswith(refusal(name, value))
    assert len(caught.value.message) > len(refusal(name, value))


@pytest.mark.parametrize(("name", "value"), [case for case in BAD if case[1] is not None])
def test_the_same_values_are_refused_in_a_file(name: str, value: object, tmp_path: Path) -> None:
    """None in a file is the same as saying nothing."""
    with pytest.raises(SettingError) as caught:
        load_serve_config(as_file(tmp_path, settings_with(name, value)))
    place = "applications[0].args.models[0]."
    assert caught.value.message.startswith(place + refusal(name, value))
    assert len(caught.value.message) > len(place + refusal(name, value))


@pytest.mark.parametrize(("name", "value"), [case for case in BAD if case[1] is not None])
def test_the_same_values_are_refused_as_flags(name: str, value: object) -> None:
    """As `brimful serve` reads its flags; that it exits with 2 and one line is shown in tests/unit/cli."""
    with pytest.raises(BrimfulError) as caught:
        serve_config(None, settings_with(name, value))
    setting, rest = refusal(name, value).split(" ", 1)
    assert caught.value.message.startswith(f"--{setting.replace('_', '-')} {rest}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("settings", "name", "words"), TOGETHER)
def test_settings_that_forbid_each_other_are_named(
    settings: dict[str, Any], name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError) as caught:
        SchedulerConfig(**settings)
    assert caught.value.message.startswith(f"{name} = {settings[name]!r} is not allowed: ")
    assert words in caught.value.message
    with pytest.raises(SettingError) as in_file:
        load_serve_config(as_file(tmp_path, settings))
    assert in_file.value.message == "applications[0].args.models[0]." + caught.value.message


# ---- live ----

START = SchedulerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    watermark=0.5,
    long_prefill_token_threshold=9,
    max_num_partial_prefills=4,
    max_long_partial_prefills=3,
)
OPEN_START = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
WHOLE_START = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, enable_chunked_prefill=False)
SHAPE = shape_of(100, 4, max_model_len=20)
# (start, other changes, setting, allowed values at both ends, refused values beyond them, words of the range)
LIVE: list[tuple[SchedulerConfig, dict[str, Any], str, tuple[Any, ...], tuple[Any, ...], str]] = [
    (START, {}, "max_num_seqs", (1, 8), (0, 9, None), "at least 1, at most its start value, 8"),
    (
        START,
        {"max_num_batched_tokens": 6},
        "max_num_seqs",
        (1, 5),
        (0, 6),
        "at least 1, at most max_num_batched_tokens - 1 = 5",
    ),
    (
        START,
        {},
        "max_num_batched_tokens",
        (9, 32),
        (8, 33, None),
        "at least max_num_seqs + 1 = 9, at most its start value, 32",
    ),
    (START, {}, "watermark", (0, 0.5), (-TINY, 0.5 + TINY, None), "at least 0, at most its start value, 0.5"),
    (START, {}, "long_prefill_token_threshold", (1, 9), (0, -1, 10, None), "at least 1, at most its start value, 9"),
    (
        START,
        {},
        "max_num_partial_prefills",
        (3, 4),
        (2, 5, None),
        "at least max_long_partial_prefills = 3, at most its start value, 4",
    ),
    (START, {}, "max_long_partial_prefills", (1, 3), (0, 4, None), "at least 1, at most its start value, 3"),
    (
        START,
        {"max_num_partial_prefills": 2},
        "max_long_partial_prefills",
        (1, 2),
        (3,),
        "at least 1, at most max_num_partial_prefills = 2",
    ),
    (OPEN_START, {}, "long_prefill_token_threshold", (0, 10**6), (-1,), "at least 0 (none)"),
    (OPEN_START, {}, "max_num_partial_prefills", (1, 10**6, None), (0,), "at least 1, or None for no limit"),
    (OPEN_START, {}, "max_long_partial_prefills", (None,), (1,), "only None without long_prefill_token_threshold"),
    (
        OPEN_START,
        {"long_prefill_token_threshold": 5},
        "max_long_partial_prefills",
        (1, 10**6, None),
        (0,),
        "at least 1, or None for no limit",
    ),
    (
        OPEN_START,
        {"max_long_partial_prefills": 2},
        "long_prefill_token_threshold",
        (1, 10**6),
        (0,),
        "at least 1",
    ),
    (
        WHOLE_START,
        {},
        "max_num_batched_tokens",
        (20, 32),
        (19, 33),
        "at least max_model_len = 20 while enable_chunked_prefill is off, at most its start value, 32",
    ),
    (WHOLE_START, {}, "long_prefill_token_threshold", (0,), (1,), "only 0 while enable_chunked_prefill is off"),
    (WHOLE_START, {}, "max_num_partial_prefills", (None,), (1,), "only None while enable_chunked_prefill is off"),
    (WHOLE_START, {}, "max_long_partial_prefills", (None,), (1,), "only None while enable_chunked_prefill is off"),
]


@pytest.mark.parametrize(("start", "others", "name", "good", "bad", "words"), LIVE)
def test_live_changes_are_taken_within_their_range_and_refused_beyond_it(
    start: SchedulerConfig,
    others: dict[str, Any],
    name: str,
    good: tuple[Any, ...],
    bad: tuple[Any, ...],
    words: str,
) -> None:
    for value in good:
        after = changed(start, start, {name: value, **others}, SHAPE)
        assert budgets_of(after) == {**budgets_of(start), **others, name: value}
    for value in bad:
        with pytest.raises(SettingError) as caught:
            changed(start, start, {name: value, **others}, SHAPE)
        assert caught.value.message.startswith(f"{name} = {value!r} is not allowed: ")
        assert words in caught.value.message
    shown = allowed(start, {**budgets_of(start), **others}, SHAPE)[name].as_json()
    numbers = [value for value in good if value is not None]
    assert shown["none"] == (None in good)
    assert shown["min"] == min(numbers, default=None)
    assert shown["max"] == (None if 10**6 in numbers else max(numbers, default=None))


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_live_value_of_another_type_is_refused_with_the_range(name: str) -> None:
    for value in NOT_A_NUMBER if name == "watermark" else (*NOT_WHOLE, None):
        with pytest.raises(SettingError) as caught:
            changed(START, START, {name: value}, SHAPE)
        assert caught.value.message.startswith(f"{name} = {value!r} is not allowed: a")
        assert "at least" in caught.value.message and "at most" in caught.value.message


@pytest.mark.parametrize("name", [*sorted(set(SETTINGS) - set(CHANGEABLE)), "block_size", "no_such_setting"])
def test_what_is_fixed_at_the_start_is_refused_live_with_what_may_change(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        changed(START, START, {name: 1}, SHAPE)
    assert caught.value.message == (
        f"{name} = 1 is not allowed: only these can change on a running replica: {', '.join(CHANGEABLE)}"
    )
