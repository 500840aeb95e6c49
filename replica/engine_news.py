"""The columns of the next `EngineUpdate`, filled until it is handed over."""

from __future__ import annotations

from replica.engine_api import EngineUpdate
from replica.errors import ErrorInfo
from replica.request import FinishReason, LoadReport
from replica.scheduler.plan import PENDING_TOKEN
from replica.stats import RequestTimings, StepStats


class News:
    """Rows in the order in which they happened, so that a sequence's last row is its end."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self._request_ids: list[str] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self._finish_reasons: list[FinishReason | None] = []
        self._stop_reasons: list[int | None] = []
        self._errors: list[ErrorInfo | None] = []
        self._num_cached_tokens: list[int] = []
        self._timings: list[RequestTimings | None] = []

    @property
    def waiting(self) -> bool:
        """There is something to hand over."""
        return bool(self._request_ids or self.accepted)

    def add(
        self,
        request_id: str,
        index: int,
        token_id: int = PENDING_TOKEN,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: ErrorInfo | None = None,
        num_cached_tokens: int = 0,
        timings: RequestTimings | None = None,
    ) -> None:
        self._request_ids.append(request_id)
        self._indexes.append(index)
        self._token_ids.append(token_id)
        self._finish_reasons.append(finish_reason)
        self._stop_reasons.append(stop_reason)
        self._errors.append(error)
        self._num_cached_tokens.append(num_cached_tokens)
        self._timings.append(timings)

    def as_update(self, made_at_s: float, stats: StepStats, load: LoadReport) -> EngineUpdate:
        """The finished columns; nothing may be added afterwards."""
        return EngineUpdate(
            made_at_s,
            stats,
            load,
            self.accepted,
            self._request_ids,
            self._indexes,
            self._token_ids,
            self._finish_reasons,
            self._stop_reasons,
            self._errors,
            self._num_cached_tokens,
            self._timings,
        )
