"""The one table from error codes to HTTP, and the error bodies clients get, in OpenAI's shape.

Messages of request errors and refusals are written for clients. Whatever isn't meant for them (start-up errors, our own
bugs) becomes a 500 with a neutral text; the real one belongs in the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deployments import openai_responses
from replica.errors import BrimfulError, ErrorInfo

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "service_unavailable_error"

STATUS_BY_CODE: dict[str, tuple[int, str]] = {
    "invalid_request": (400, INVALID),
    "invalid_value": (400, INVALID),
    "context_length_exceeded": (400, INVALID),
    "body_too_large": (413, INVALID),
    "model_not_found": (404, INVALID),
    "forbidden": (403, INVALID),
    "refused": (503, OVERLOADED),
    "queue_full": (503, OVERLOADED),
    "queue_timeout": (503, OVERLOADED),
    "unavailable": (503, OVERLOADED),
    "engine_failure": (500, SERVER),
    "step_failed": (500, SERVER),
    "non_finite_logits": (500, SERVER),
    "engine_dead": (503, SERVER),
    "internal_error": (500, SERVER),
    "startup_error": (500, SERVER),
    "invalid_setting": (500, SERVER),
    "model_files_not_found": (500, SERVER),
    "model_unsupported": (500, SERVER),
    "resource_error": (500, SERVER),
}
_NOT_FOR_CLIENTS = frozenset(
    {
        "internal_error",
        "startup_error",
        "invalid_setting",
        "model_files_not_found",
        "model_unsupported",
        "resource_error",
    }
)
NEUTRAL = ErrorInfo("internal_error", "the server failed to handle this request")
_MAX_MESSAGE_CHARS = 1500
_MAX_RETRY_AFTER_S = 3600


@dataclass(frozen=True, slots=True)
class HttpError:
    """A whole answer: `body` is JSON."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def http_error(error: Exception | ErrorInfo) -> HttpError:
    """The answer to a request that ended in `error` before anything was sent.

    503 always carries `Retry-After` in whole seconds, at least 1.
    """
    info = client_info(error)
    status, kind = STATUS_BY_CODE[info.code]
    headers = {"Retry-After": str(_retry_after(info.retry_after_s))} if status == 503 else {}
    return HttpError(status, error_body(info.message, kind, info.code, info.param), headers)


def error_event(error: Exception | ErrorInfo) -> bytes:
    """The same body, for an answer that has begun: the data of a last event."""
    info = client_info(error)
    return error_body(info.message, STATUS_BY_CODE[info.code][1], info.code, info.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    return openai_responses.to_json(openai_responses.error(message[:_MAX_MESSAGE_CHARS], kind, code, param))


def client_info(error: Exception | ErrorInfo) -> ErrorInfo:
    """What the client may know of `error`."""
    info = error.info() if isinstance(error, BrimfulError) else error if isinstance(error, ErrorInfo) else NEUTRAL
    return NEUTRAL if info.code in _NOT_FOR_CLIENTS or info.code not in STATUS_BY_CODE else info


def _retry_after(seconds: float | None) -> int:
    if seconds is None or not math.isfinite(seconds):
        return 1
    return min(max(math.ceil(seconds), 1), _MAX_RETRY_AFTER_S)
