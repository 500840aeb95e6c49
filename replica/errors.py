"""Every error that brimful raises on purpose.

    BrimfulError
    |- StartupError            the operator must change something; one line, exit code 2
    |  |- SettingError         a setting is out of its range
    |  |- ModelNotFound        no such folder, file or hub id; or no network to fetch it
    |  |- ModelUnsupported     the architecture would be wrong or impossible under paged attention
    |  `- ResourceError        a port is taken, memory or disk is too small
    |- RequestError            the client must change something; nothing was computed
    |  |- InvalidRequest       a field has a wrong type or an impossible value
    |  |- BodyTooLarge         the request body is larger than the ingress takes
    |  |- UnknownModel         the model isn't served here
    |  |- Forbidden            it may be asked, but not from there
    |  `- PromptTooLong        the prompt doesn't fit; carries the real limit and the real length
    |- Refused                 nothing is wrong, but not now; carries retry_after_s
    |  |- QueueFull            the waiting queue is at its bound
    |  |- QueueTimeout         the request waited longer than queue_timeout_s
    |  `- Unavailable          starting, draining, or no replica can take it
    `- EngineFailure           our fault; the message for the client names no internals
       |- StepFailed           this request's rows failed in the forward, its neighbours went on
       |- NonFiniteLogits      this request's logits were NaN or infinite
       `- EngineDead           the engine process or its replica is gone

Errors cross process borders as `ErrorInfo` (plain data), never as pickled exceptions. `deployments/error_map.py` turns
each `code` into an HTTP status; nothing else knows about HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as plain data. `code` is the key of the one table to HTTP; `param` names the client's field, if any."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class BrimfulError(Exception):
    """Root of the tree. `message` is written for whoever must act on it, in one line."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.param, self.retry_after_s)

    def __reduce__(self) -> tuple[Any, ...]:
        """Constructors of subclasses differ: what is pickled after all (by Ray) is the plain data."""
        return error_from_info, (self.info(),)


class StartupError(BrimfulError):
    code = "startup_error"


class SettingError(StartupError):
    """A setting has a value outside its range. The message always names the setting, the value and what is allowed."""

    code = "invalid_setting"

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r} is not allowed: {allowed}", param=name)


class ModelNotFound(StartupError):
    code = "model_files_not_found"


class ModelUnsupported(StartupError):
    code = "model_unsupported"


class ResourceError(StartupError):
    code = "resource_error"


class RequestError(BrimfulError):
    code = "invalid_request"


class InvalidRequest(RequestError):
    code = "invalid_value"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class UnknownModel(RequestError):
    code = "model_not_found"


class Forbidden(RequestError):
    code = "forbidden"


class PromptTooLong(RequestError):
    code = "context_length_exceeded"


class Refused(BrimfulError):
    code = "refused"


class QueueFull(Refused):
    code = "queue_full"


class QueueTimeout(Refused):
    code = "queue_timeout"


class Unavailable(Refused):
    code = "unavailable"


class EngineFailure(BrimfulError):
    code = "engine_failure"


class StepFailed(EngineFailure):
    code = "step_failed"


class NonFiniteLogits(EngineFailure):
    code = "non_finite_logits"


class EngineDead(EngineFailure):
    code = "engine_dead"


def error_from_info(info: ErrorInfo) -> BrimfulError:
    """The exception that `info` was made from; an unknown code becomes an `EngineFailure` with the same text."""
    kind = _BY_CODE.get(info.code, EngineFailure)
    error = kind.__new__(kind)
    BrimfulError.__init__(error, info.message, param=info.param, retry_after_s=info.retry_after_s)
    return error


def _tree(root: type[BrimfulError]) -> dict[str, type[BrimfulError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(BrimfulError)
