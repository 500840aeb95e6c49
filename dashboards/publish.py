"""Puts the boards into a Grafana, by its HTTP API. Publishing again replaces what is there; nothing is ever doubled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

from grafana_api.grafana_api import GrafanaClientError, GrafanaException, GrafanaUnauthorizedError
from grafana_api.grafana_face import GrafanaFace

from dashboards.generate import boards
from dashboards.panels import Json
from replica.errors import StartupError

TIMEOUT_S = 10.0

_T = TypeVar("_T")


class PublishError(StartupError):
    """The boards couldn't be published. One line that says what to change."""

    code = "publish_failed"


def publish(
    url: str,
    token: str | None = None,
    *,
    user: str | None = None,
    password: str | None = None,
    datasource_uid: str | None = None,
    folder: str = "brimful",
) -> list[str]:
    """Creates or updates `folder` and every board in it; gives the boards' addresses.

    Signs in with a service account `token`, or with `user` and `password`. `datasource_uid` names the Prometheus data
    source that the boards show first (None: Grafana's default one); it must exist. Raises `PublishError`.
    """
    if not folder.strip():
        raise PublishError("the folder needs a title")
    parts = _split(url)
    grafana = _connect(parts, token, user, password)
    try:
        return _Publisher(grafana, url).publish(datasource_uid, folder)
    finally:
        grafana.api.s.close()


class _Publisher:
    """One signed-in connection; every call turns a failure into a `PublishError` that says what to do about it."""

    def __init__(self, grafana: Any, url: str) -> None:
        self._grafana = grafana
        self._url = url.rstrip("/")

    def publish(self, datasource_uid: str | None, folder: str) -> list[str]:
        health = self._absent_is_none(lambda: self._grafana.api.GET("/health"), "health")
        if not isinstance(health, dict) or "database" not in health:
            raise PublishError(self._no_grafana())
        if datasource_uid is not None:
            path = f"/datasources/uid/{quote(datasource_uid, safe='')}"
            if self._absent_is_none(lambda: self._grafana.api.GET(path), "data source") is None:
                raise PublishError(f"Grafana at {self._url} has no data source with the uid {datasource_uid!r}")
        folder_uid = self._folder(folder)
        return [self._board(board.json(), folder_uid, datasource_uid) for board in boards()]

    def _folder(self, title: str) -> str:
        """The uid of the folder with this title, made if there is none."""
        for folder in self._call(self._grafana.folder.get_all_folders, "folders"):
            if folder["title"] == title:
                return str(folder["uid"])
        uid = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40]
        made = self._call(lambda: self._grafana.folder.create_folder(title, uid or None), "folder")
        return str(made["uid"])

    def _board(self, board: Json, folder_uid: str, datasource_uid: str | None) -> str:
        if datasource_uid is not None:
            board["templating"]["list"][0]["current"] = {"text": datasource_uid, "value": datasource_uid}
        body = {"dashboard": board, "folderUid": folder_uid, "overwrite": True, "message": "brimful dashboards publish"}
        saved = self._call(lambda: self._grafana.dashboard.update_dashboard(body), board["title"])
        path = urlsplit(self._url).path
        return self._url.removesuffix(path) + _under(path, saved["url"])

    def _absent_is_none(self, call: Callable[[], _T], what: str) -> _T | None:
        try:
            return self._call(call, what)
        except PublishError as error:
            if isinstance(error.__cause__, GrafanaException) and error.__cause__.status_code == 404:
                return None
            raise

    def _call(self, call: Callable[[], _T], what: str) -> _T:
        try:
            return call()
        except GrafanaUnauthorizedError as error:
            raise PublishError(f"Grafana at {self._url} refuses the token or password (401)") from error
        except GrafanaClientError as error:
            if error.status_code == 403:
                message = f"the account may not change {what} (403): it needs the role Editor"
            else:
                message = f"Grafana at {self._url} refuses {what}: {_one_line(error.message)}"
            raise PublishError(message) from error
        except GrafanaException as error:
            raise PublishError(f"Grafana at {self._url} fails on {what}: {_one_line(error.message)}") from error
        except (ValueError, TypeError) as error:  # not JSON, or not the JSON that grafana-api expects
            raise PublishError(self._no_grafana()) from error
        except OSError as error:  # requests' errors, and the socket's own
            raise PublishError(f"Grafana at {self._url} can't be reached: {_one_line(str(error))}") from error

    def _no_grafana(self) -> str:
        return f"{self._url} answers, but isn't Grafana; give the address of Grafana's start page"


def _connect(parts: SplitResult, token: str | None, user: str | None, password: str | None) -> Any:
    auth: str | tuple[bytes, bytes]
    if token is not None and user is None and password is None:
        auth = token.strip()
        if not (auth.isascii() and auth.isprintable() and auth):
            raise PublishError("the token holds characters that no Grafana token has; was it copied whole?")
    elif token is None and user is not None and password is not None:
        auth = (user.encode(), password.encode())
    else:
        raise PublishError("give either a service account token, or a user and a password")
    prefix = parts.path.strip("/")
    return GrafanaFace(
        auth,
        protocol=parts.scheme,
        host=f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname,
        port=parts.port,
        url_path_prefix=f"{prefix}/" if prefix else "",
        timeout=TIMEOUT_S,
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise PublishError(f"{url!r} is no address of a Grafana; one looks like http://localhost:3000")
    if "@" in parts.netloc:
        raise PublishError("the address holds a user or a password; give them apart from it")
    return parts


def _under(prefix: str, path: str) -> str:
    """Grafana's own path of a board, which already has the prefix when Grafana knows of it."""
    return path if path.startswith(f"{prefix}/") else prefix + path


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
