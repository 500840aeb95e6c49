"""Why nobody answered at a URL, in the same words for every command."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from replica.errors import Unavailable


def no_answer(base_url: str, error: Exception) -> Unavailable:
    """The error for `error`, which a request to the service or reading its answer raised."""
    return Unavailable(f"no brimful answers at {base_url} ({_reason(error)})")


def check_port(base_url: str) -> None:
    """Raises `Unavailable` for a port that can't be: the HTTP client finds that out in ways of its own."""
    try:
        urlsplit(base_url).port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise Unavailable(f"no brimful answers at {base_url} ({error})") from None


def _reason(error: Exception) -> str:
    match error:
        case httpx.HTTPStatusError():
            return f"HTTP {error.response.status_code}"
        case httpx.ConnectTimeout():
            return "no connection in time"
        case httpx.ConnectError():
            # Its text differs between the synchronous and the asynchronous client.
            return "nothing accepts a connection there; is it running?"
        case httpx.TimeoutException():
            return "it takes a connection, but doesn't answer in time"
        case httpx.HTTPError() | httpx.InvalidURL():
            return str(error) or type(error).__name__
        case _:
            return "what answers there isn't brimful"
