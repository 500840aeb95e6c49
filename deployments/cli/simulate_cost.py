"""A step cost given by `--cost`, for all commands that take one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.cli.flags import in_flag_terms
from replica.errors import SettingError

if TYPE_CHECKING:
    from bench.simulate.step_cost import StepCost


def given_cost(name_or_path: str) -> StepCost:
    """A preset by name, or a cost file. Raises `SettingError`, in the words of the flag."""
    from bench.simulate.step_cost import load_cost

    try:
        return load_cost(name_or_path)
    except SettingError as error:
        raise in_flag_terms(error, {"cost": name_or_path}) from None
