"""Which settings a running scheduler may change, and how far."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from replica.config import SchedulerConfig
from replica.errors import SettingError
from replica.model.api import ModelShape

CHANGEABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "watermark",
)

_KINDS: dict[str, tuple[Any, str]] = {
    "max_num_partial_prefills": ((int, type(None)), "a whole number, or None for no limit"),
    "max_long_partial_prefills": ((int, type(None)), "a whole number, or None for no limit"),
    "watermark": ((int, float), "a number"),
}


def check_against_model(config: SchedulerConfig, shape: ModelShape) -> None:
    """Raises SettingError where a setting contradicts the model that is loaded."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < shape.max_model_len:
        allowed = f"at least max_model_len = {shape.max_model_len} while enable_chunked_prefill is off"
        raise SettingError("max_num_batched_tokens", config.max_num_batched_tokens, allowed)


def changed(start: SchedulerConfig, now: SchedulerConfig, changes: dict[str, Any]) -> SchedulerConfig:
    """`now` with these changes, none above its value in `start`: the KV pool and captured graphs were sized for those.

    Raises SettingError.
    """
    for name, value in changes.items():
        if name not in CHANGEABLE:
            raise SettingError(name, value, f"only these can change on a running replica: {', '.join(CHANGEABLE)}")
        kinds, allowed = _KINDS.get(name, ((int,), "a whole number"))
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise SettingError(name, value, allowed)
        if _as_limit(name, value) > _as_limit(name, getattr(start, name)):
            raise SettingError(name, value, f"at most its start value, {getattr(start, name)}")
    return replace(now, **changes)


def _as_limit(name: str, value: float | None) -> float:
    no_limit = value is None or (name == "long_prefill_token_threshold" and value == 0)
    return inf if no_limit or value is None else value
