"""Which settings a running scheduler may change, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Literal

from replica.config import SchedulerConfig
from replica.errors import SettingError
from replica.model.api import ModelShape
from replica.setting_range import SettingRange

CHANGEABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "watermark",
)

_WITHOUT_CHUNKS = "while enable_chunked_prefill is off"


def check_against_model(config: SchedulerConfig, shape: ModelShape) -> None:
    """Raises SettingError where a setting contradicts the model that is loaded."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < shape.max_model_len:
        allowed = f"at least max_model_len = {shape.max_model_len} {_WITHOUT_CHUNKS}"
        raise SettingError("max_num_batched_tokens", config.max_num_batched_tokens, allowed)


def budgets_of(config: SchedulerConfig) -> dict[str, Any]:
    """The settings that may change, by name."""
    return {name: getattr(config, name) for name in CHANGEABLE}


def changed(
    start: SchedulerConfig, now: SchedulerConfig, changes: Mapping[str, Any], shape: ModelShape
) -> SchedulerConfig:
    """`now` with these changes, none above its value in `start`: the KV pool and captured graphs were sized for those.

    Settings changed together are checked together. Raises SettingError for the first that isn't allowed.
    """
    ranges = allowed(start, budgets_of(now), shape)
    for name, value in changes.items():
        if name not in ranges:
            raise SettingError(name, value, f"only these can change on a running replica: {', '.join(CHANGEABLE)}")
        if not ranges[name].is_kind(value):
            raise SettingError(name, value, ranges[name].words)
    ranges = allowed(start, {**budgets_of(now), **changes}, shape)
    for name, value in changes.items():
        ranges[name].check(name, value)
    return replace(now, **changes)


def allowed(start: SchedulerConfig, budgets: Mapping[str, Any], shape: ModelShape) -> dict[str, SettingRange]:
    """For each changeable setting what it may be while the others are as in `budgets`."""
    seqs, tokens = budgets["max_num_seqs"], budgets["max_num_batched_tokens"]
    lows = [(seqs + 1, f"max_num_seqs + 1 = {seqs + 1}")]
    if not start.enable_chunked_prefill:
        lows.append((shape.max_model_len, f"max_model_len = {shape.max_model_len} {_WITHOUT_CHUNKS}"))
    return {
        "max_num_seqs": _whole(
            lows=[(1, "1")],
            highs=[_at_start(start.max_num_seqs), (tokens - 1, f"max_num_batched_tokens - 1 = {tokens - 1}")],
        ),
        "max_num_batched_tokens": _whole(lows=lows, highs=[_at_start(start.max_num_batched_tokens)]),
        **_prefill_ranges(start, budgets),
        "watermark": SettingRange(
            "number", f"a number, at least 0, at most its start value, {start.watermark}", 0, start.watermark
        ),
    }


def _prefill_ranges(start: SchedulerConfig, budgets: Mapping[str, Any]) -> dict[str, SettingRange]:
    """0 is the threshold's word for no limit, None that of the others: nothing is above it."""
    names = ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills")
    if not start.enable_chunked_prefill:
        return {
            names[0]: SettingRange("whole", f"only 0 {_WITHOUT_CHUNKS}", 0, 0),
            names[1]: _only_none(_WITHOUT_CHUNKS),
            names[2]: _only_none(_WITHOUT_CHUNKS),
        }
    threshold, partial, long = (budgets[name] for name in names)
    threshold_low = (0, "0 (none)") if start.long_prefill_token_threshold == 0 and long is None else (1, "1")
    ranges = {
        names[0]: _whole(
            lows=[threshold_low],
            highs=[_at_start(start.long_prefill_token_threshold)] if start.long_prefill_token_threshold else [],
        ),
        names[1]: _whole_or_none(
            start.max_num_partial_prefills,
            low=(1, "1") if long is None else (long, f"max_long_partial_prefills = {long}"),
        ),
        names[2]: _only_none("without long_prefill_token_threshold, which says what is long"),
    }
    if threshold:
        ranges[names[2]] = _whole_or_none(
            start.max_long_partial_prefills,
            low=(1, "1"),
            highs=[] if partial is None else [(partial, f"max_num_partial_prefills = {partial}")],
        )
    return ranges


_Bound = tuple[float, str]


def _at_start(value: float) -> _Bound:
    return value, f"its start value, {value}"


def _only_none(when: str) -> SettingRange:
    return SettingRange("whole", f"only None {when}", low=1, high=0, or_none=True)


def _whole_or_none(start_value: int | None, *, low: _Bound, highs: list[_Bound] | None = None) -> SettingRange:
    highs = (highs or []) + ([] if start_value is None else [_at_start(start_value)])
    return _whole(lows=[low], highs=highs, or_none=start_value is None)


def _whole(*, lows: list[_Bound], highs: list[_Bound], or_none: bool = False) -> SettingRange:
    """A whole number between the tightest of these bounds."""
    low, low_words = max(lows, key=lambda bound: bound[0])
    high, high_words = min(highs, key=lambda bound: bound[0], default=(inf, ""))
    words = f"a whole number, at least {low_words}"
    if high_words:
        words += f", at most {high_words}"
    kind: Literal["whole"] = "whole"
    return SettingRange(kind, words + (", or None for no limit" if or_none else ""), low, high, or_none=or_none)
