"""The settings by which replicas are chosen, and the base of all settings. Their tree is in `config.py`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deployments.setting_errors import setting_error


class Settings(BaseModel):
    """Base of the tree: frozen, and a name that it doesn't know is an error. Types are strict: true is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    @classmethod
    def checked(cls, args: object, *, path: str = "") -> Self:
        """`args` as these settings. Raises `SettingError` for the first problem; `path` leads the setting's name."""
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise setting_error(error, path) from None


class RouterSettings(Settings):
    """How a replica is chosen: by weighted scorers (a weight of 0 switches one off), or by a simple policy without
    weights. Bounds are those of `router/config.py`."""

    policy: Literal["scores", "round_robin", "power_of_two", "least_in_flight", "session_affinity"] = Field(
        default="scores", description="how a replica is chosen: by weighted scores, or by a simple rule"
    )
    cost_s: float = Field(default=1.0, ge=0, le=100, description="weight: few seconds to wait, for it and for others")
    kv_headroom: float = Field(default=0.0, ge=0, le=100, description="weight: free share of the KV cache")
    queue_depth: float = Field(default=0.0, ge=0, le=100, description="weight: short waiting queue")
    prefix_affinity: float = Field(default=0.0, ge=0, le=100, description="weight: prompt prefix already cached there")

    @property
    def weights(self) -> dict[str, float]:
        """Scorer -> weight."""
        return self.model_dump(exclude={"policy"})

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if not any(self.weights.values()):
            raise ValueError("at least one weight above 0")
        return self
