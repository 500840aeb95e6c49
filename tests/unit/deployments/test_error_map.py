from __future__ import annotations

import json
import math

import pytest

from deployments.error_map import STATUS_BY_CODE, error_body, error_event, http_error
from replica import errors
from replica.errors import BrimfulError, EngineDead, ErrorInfo, InvalidRequest, PromptTooLong, QueueFull, SettingError


def kinds(root: type[BrimfulError] = BrimfulError) -> list[type[BrimfulError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


def test_every_error_of_the_tree_has_a_row_and_every_row_an_error() -> None:
    ours = {kind.code for kind in kinds() if kind.__module__ == errors.__name__}
    assert ours == set(STATUS_BY_CODE)


def test_a_request_error_names_the_field() -> None:
    answer = http_error(InvalidRequest("too hot", param="temperature"))
    assert (answer.status, answer.headers) == (400, {})
    assert json.loads(answer.body) == {
        "error": {
            "message": "too hot",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptTooLong("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.UnknownModel("no"), 404, "invalid_request_error", "model_not_found"),
        (errors.BodyTooLarge("big"), 413, "invalid_request_error", "body_too_large"),
        (QueueFull("full"), 503, "service_unavailable_error", "queue_full"),
        (errors.Unavailable("starting"), 503, "service_unavailable_error", "unavailable"),
        (EngineDead("gone"), 503, "server_error", "engine_dead"),
        (errors.StepFailed("failed"), 500, "server_error", "step_failed"),
        (ErrorInfo("queue_timeout", "waited"), 503, "service_unavailable_error", "queue_timeout"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str, code: str) -> None:
    answer = http_error(error)
    body = json.loads(answer.body)["error"]
    assert (answer.status, body["type"], body["code"]) == (status, kind, code)


@pytest.mark.parametrize(
    ("seconds", "header"),
    [(None, "1"), (0.0, "1"), (-3.0, "1"), (1.2, "2"), (30.0, "30"), (math.nan, "1"), (math.inf, "1"), (1e9, "3600")],
)
def test_503_says_when_to_come_back_in_whole_seconds(seconds: float | None, header: str) -> None:
    assert http_error(QueueFull("full", retry_after_s=seconds)).headers == {"Retry-After": header}


@pytest.mark.parametrize(
    "error",
    [ValueError("secret"), SettingError("secret", 1, "x"), ErrorInfo("no_such_code", "secret"), KeyError("secret")],
)
def test_what_is_not_for_clients_becomes_a_neutral_500(error: Exception) -> None:
    answer = http_error(error)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert b"secret" not in error_event(error)


def test_bodies_stay_small_and_valid() -> None:
    body = error_body("🌶\ud83d\u2028" * 5000, "server_error")
    assert len(body) < 8192
    assert json.loads(body)["error"]["message"].startswith("🌶?\u2028")
