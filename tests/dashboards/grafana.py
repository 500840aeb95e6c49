"""The part of Grafana's HTTP API that publishing uses, kept in memory, with Grafana's status codes and messages."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_test"
LOGIN = ("admin", "pässword")
READER_TOKEN = "glsa_reader"


class Refusal(Exception):
    """An answer that isn't 200, as Grafana words it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Grafana:
    """`prefix` is the path that it is served under. `calls` are the changes asked of it, in order."""

    prefix: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    datasources: tuple[str, ...] = ("prometheus",)
    calls: list[str] = field(default_factory=list)
    broken: bool = False

    def answer(self, method: str, path: str, authorization: str, body: dict[str, Any]) -> Any:
        if not path.startswith(f"{self.prefix}/api/"):
            raise Refusal(404, "Not found")
        path = path.removeprefix(f"{self.prefix}/api")
        if path == "/health":
            return {"database": "ok", "version": "12.1.0"}
        if self.broken:
            raise Refusal(500, "database is locked")
        self._sign_in(authorization, method)
        if method == "POST":
            self.calls.append(path)
        if path.startswith("/datasources/uid/"):
            if path.removeprefix("/datasources/uid/") not in self.datasources:
                raise Refusal(404, "Data source not found")
            return {"uid": "prometheus"}
        if (method, path) == ("GET", "/folders"):
            return [{"uid": uid, "title": title} for uid, title in self.folders.items()]
        if (method, path) == ("POST", "/folders"):
            return self._make_folder(body)
        if (method, path) == ("POST", "/dashboards/db"):
            return self._save(body)
        raise Refusal(404, "Not found")

    def _sign_in(self, authorization: str, method: str) -> None:
        login = base64.b64encode(":".join(LOGIN).encode()).decode()
        if authorization == f"Bearer {READER_TOKEN}" and method == "GET":
            return
        if authorization == f"Bearer {READER_TOKEN}":
            raise Refusal(403, "You'll need additional permissions to perform this action.")
        if authorization not in (f"Bearer {TOKEN}", f"Basic {login}"):
            raise Refusal(401, "Invalid API key")

    def _make_folder(self, body: dict[str, Any]) -> Any:
        if body["title"] in self.folders.values() or body["uid"] in self.folders:
            raise Refusal(409, "a folder with the same name already exists")
        self.folders[body["uid"]] = body["title"]
        return {"uid": body["uid"], "title": body["title"]}

    def _save(self, body: dict[str, Any]) -> Any:
        if body["folderUid"] not in self.folders:
            raise Refusal(400, "folder not found")
        uid = body["dashboard"]["uid"]
        if uid in self.dashboards and not body["overwrite"]:
            raise Refusal(412, "The dashboard has been changed by someone else")
        self.dashboards[uid] = body
        return {"uid": uid, "status": "success", "url": f"{self.prefix}/d/{uid}/{uid}"}


@contextmanager
def grafana_server(grafana: Grafana) -> Iterator[str]:
    """Serves it on a free port of 127.0.0.1; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply("GET")

        def do_POST(self) -> None:
            self._reply("POST")

        def _reply(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            try:
                status, answer = 200, grafana.answer(method, self.path, self.headers.get("Authorization", ""), body)
            except Refusal as refusal:
                status, answer = refusal.status, {"message": refusal.message}
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: object) -> None:
            del args  # pytest's output is no access log

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{grafana.prefix}"
        finally:
            server.shutdown()
            thread.join()
