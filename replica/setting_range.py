"""What one setting may be: its type and bounds, as an object that checks a value and says what is allowed."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from replica.errors import SettingError


@dataclass(frozen=True, slots=True)
class SettingRange:
    """Values from `low` to `high`, both included, except those in `but`; None too where `or_none`.

    `low` above `high`: nothing but None. `words` say it all and end the error message. A number is finite; true and
    false are no numbers, and 1.0 is no whole number.
    """

    kind: Literal["switch", "whole", "number"]
    words: str
    low: float = -math.inf
    high: float = math.inf
    but: tuple[float, ...] = ()
    or_none: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises `SettingError` naming the setting, its value and what is allowed."""
        if not self.is_kind(value):
            raise SettingError(name, value, self.words)
        if value is None or self.kind == "switch":
            return
        assert isinstance(value, int | float)
        if not self.low <= value <= self.high or value in self.but:
            raise SettingError(name, value, self.words)

    def as_json(self) -> dict[str, Any]:
        """`min` None: no value at all, only None. `max` None: no upper bound."""
        some = self.low <= self.high
        high = self.high if some and self.high < math.inf else None
        return {"min": self.low if some else None, "max": high, "none": self.or_none, "words": self.words}

    def is_kind(self, value: object) -> bool:
        """The type is right; a number may still be out of bounds."""
        if value is None:
            return self.or_none
        if self.kind == "switch" or isinstance(value, bool):
            return self.kind == "switch" and isinstance(value, bool)
        if self.kind == "whole":
            return isinstance(value, int)
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max


SWITCH = SettingRange("switch", "true or false")
COUNT = SettingRange("whole", "a whole number, at least 1", low=1)
COUNT_OR_NONE = SettingRange("whole", "a whole number, at least 1, or None for no limit", low=1, or_none=True)
OPTIONAL_COUNT = SettingRange("whole", "a whole number, at least 1", low=1, or_none=True)
POSITIVE_S = SettingRange("number", "a number of more than 0 seconds", low=0, but=(0,))
SECONDS = SettingRange("number", "0 seconds or more", low=0)
