"""`brimful limits`: the limits of running replicas, shown and changed over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from deployments.cli.flags import flag_of
from deployments.cli.no_answer import check_port, no_answer
from replica.errors import BrimfulError, ErrorInfo, SettingError, Unavailable, UnknownModel, error_from_info

# A change makes three rounds over the replicas, each of which waits 2 s for silent ones, after the same of another
# change that is under way.
TIMEOUT_S = 30.0
MAX_NAMED = 5
PARTS = ("now", "start", "allowed")


def given_limits(flags: Mapping[str, int | float | str | None]) -> dict[str, Any]:
    """The limits that flags were given for. `none` is no limit: null. Raises `SettingError`."""
    limits: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, str):
            try:
                limits[name] = None if value.lower() == "none" else int(value)
            except ValueError:
                raise SettingError(flag_of(name), value, "a whole number, or none for no limit") from None
        else:
            limits[name] = value
    return limits


def client_of(base_url: str) -> httpx.AsyncClient:
    """To be used in an `async with`. Raises `Unavailable` for a port that can't be."""
    check_port(base_url)
    return httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False)


async def fetch_limits(client: httpx.AsyncClient, model: str | None, route: str | None) -> dict[str, Any]:
    """The JSON of `GET /limits`, of the models that are named. Raises `BrimfulError`."""
    models = (await _ask(client, "GET", None))["models"]
    named = [entry for entry in models if model in (None, entry["name"]) and route in (None, entry["route"])]
    if not named:
        served = ", ".join(f"{entry['name']} on {entry['route']}" for entry in models)
        raise UnknownModel(f"no such model is served there; served: {served}")
    return {"models": named}


async def change_limits(client: httpx.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
    """`POST /limits`. Raises `BrimfulError`; a limit that was refused is named as its flag."""
    return await _ask(client, "POST", json.dumps(body))


async def _ask(client: httpx.AsyncClient, method: str, content: str | None) -> dict[str, Any]:
    base_url = str(client.base_url).rstrip("/")
    headers = {"content-type": "application/json"}
    try:
        answer = await client.request(method, "/limits", content=content, headers=headers)
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise no_answer(base_url, error) from None
    if answer.is_success and isinstance(found, dict) and "models" in found:
        return found
    raise refusal(found, f"{base_url}/limits isn't brimful's")


def refusal(found: object, otherwise: str) -> BrimfulError:
    """The error in an answer's body; one that says `otherwise` if there is none. A setting is named as its flag."""
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return Unavailable(otherwise)
    message, name = error["message"], str(error.get("param") or "")
    if name and message.startswith(f"{name} = "):
        message = flag_of(name) + message.removeprefix(name)
    return error_from_info(ErrorInfo(str(error.get("code")), message))


def show_limits(answer: Mapping[str, Any], out: RichConsole) -> None:
    """For each model one table: what each limit is now, was at the start and may be. Replicas that differ have a table
    each."""
    for model in answer["models"]:
        alike: dict[str, list[dict[str, Any]]] = {}
        for replica in model["replicas"]:
            alike.setdefault(repr([replica[part] for part in PARTS]), []).append(replica)
        for replicas in sorted(alike.values(), key=len, reverse=True):
            out.print(_table(model, replicas, model_is_uniform=len(alike) == 1))
        for note in _notes(model):
            out.print(note)


def _table(model: Mapping[str, Any], replicas: list[dict[str, Any]], *, model_is_uniform: bool) -> Table:
    ids = [replica["replica_id"] for replica in replicas]
    named = not model_is_uniform and len(ids) <= MAX_NAMED
    who = f"replica{'s' * (len(ids) != 1)}"
    who = f"{who} {', '.join(ids)}" if named else f"{len(ids)} {who}"
    title = f"{model['name']} on {model['route']}: {who}"
    table = Table("limit", "now", "at the start", "allowed", title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    now, start, allowed = (replicas[0][part] for part in PARTS)
    for name in now:
        table.add_row(name, _shown(name, now[name]), _shown(name, start[name]), _range(name, allowed[name]))
    return table


def _notes(model: Mapping[str, Any]) -> list[str]:
    notes = []
    for replica in model["replicas"]:
        tokens = replica["in_force"]["max_num_batched_tokens"]
        if tokens < replica["now"]["max_num_batched_tokens"]:
            why = "its next step hasn't begun, or device memory is short"
            notes.append(f"replica {replica['replica_id']} still plans {tokens} tokens a step: {why}")
    notes += [f"replica {replica_id} doesn't answer" for replica_id in model["silent"]]
    return notes


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return "0 (none)" if name == "long_prefill_token_threshold" and value == 0 else str(value)


def _range(name: str, allowed: Mapping[str, Any]) -> str:
    low, high = allowed["min"], allowed["max"]
    if low is None:
        return "none"
    if low == high:
        return _shown(name, low)
    text = f"{_shown(name, low)} or more" if high is None else f"{_shown(name, low)} to {high}"
    return f"{text}, none" if allowed["none"] else text
