"""What pydantic finds wrong with settings, as one `SettingError` in the words of the rest of the project."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from replica.config import SCHEDULER_RANGES
from replica.errors import SettingError

# pydantic's kinds of error that have a bound, which is in their context under the second name.
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}

_WRONG_TYPES = ("int_type", "float_type", "bool_type", "finite_number", "int_parsing_size")


def setting_error(error: ValidationError, path: str) -> SettingError:
    """The first problem that pydantic found; `path` leads the setting's name."""
    first = error.errors(include_url=False)[0]
    name = (path + _dotted(first["loc"])).rstrip(".") or "config"
    if first["type"] == "missing":
        return SettingError(name, None, "it must be set")
    if first["type"] == "too_short":
        return SettingError(name, first["input"], f"at least one {name.rpartition('.')[2].removesuffix('s')}")
    if first["type"] in _WRONG_TYPES and (known := SCHEDULER_RANGES.get(name.rpartition(".")[2])):
        return SettingError(name, first["input"], known.words)
    return SettingError(name, first["input"], _allowed(first["type"], first["msg"], first.get("ctx", {})))


def _allowed(kind: str, message: str, context: dict[str, Any]) -> str:
    """What is allowed instead, for an error of `kind`."""
    if kind == "extra_forbidden":
        return "no such setting"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"it must be {words} {_plain(context[key])}"
    if kind == "string_too_short":
        return "it must not be empty"
    if kind in ("model_type", "dict_type"):
        return "it must be a mapping (name: value)"
    if kind == "literal_error":
        expected = str(context["expected"])
        return f"it must be {expected}" if " or " in expected else f"only {expected} is supported"
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


def _plain(bound: float) -> str:
    """3.0 -> 3: pydantic gives the bound of a float setting as a float."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _dotted(loc: tuple[int | str, ...]) -> str:
    """("models", 0, "dtype") -> "models[0].dtype"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
