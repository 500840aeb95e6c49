"""What a number in a request may be, in words, read from the bounds that its field declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

_KINDS = (
    *("greater_than_equal", "greater_than", "less_than_equal", "less_than"),
    *("int_type", "int_from_float", "int_parsing_size", "float_type", "finite_number"),
)
"""pydantic's kinds of error that say that a number is wrong."""


def number_range(model: type[BaseModel], name: str, kind: str) -> str | None:
    """ "must be a whole number from 1 to 16": both ends, whichever an error of `kind` is about. None for an error of
    another kind, and for a field that isn't a number with two bounds."""
    field = model.model_fields.get(name)
    if field is None or kind not in _KINDS:
        return None
    inside = [field.annotation, *field.metadata, *_parts(field.annotation)]
    bounds = {key: bound for part in inside for key in ("ge", "gt", "le") if (bound := _bound(part, key)) is not None}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le")
    if low is None or high is None:
        return None
    number = "a whole number" if int in inside else "a number"
    return f"must be {number} from {'more than ' if 'gt' in bounds else ''}{low} to {high}"


def _bound(part: Any, key: str) -> float | None:
    bound: float | None = getattr(part, key, None)
    return bound


def _parts(annotation: Any) -> Iterator[Any]:
    """What a union and `Annotated` hold, and the bounds in a `Field` there."""
    for part in get_args(annotation):
        yield part
        yield from getattr(part, "metadata", ())
        yield from _parts(part)
