"""`brimful route`: which replica a request would be sent to now, and why. Asked over HTTP; nothing is generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from deployments.cli.limits import refusal
from deployments.cli.no_answer import no_answer
from replica.errors import SettingError, UnknownModel

COST_WORDS = {
    "load_s": "load",
    "level_s": "level",
    "just_sent_s": "just sent",
    "own_prefill_s": "own prefill",
    "home_s": "home",
    "headroom_s": "head room",
    "ramp_s": "ramp",
}
ALWAYS_SHOWN = ("load_s", "just_sent_s", "own_prefill_s")
PASSED_OVER = {
    "all_draining": "All replicas drain, so that is no reason against any of them.",
    "all_queue_full": "The waiting queues of all replicas are full, so that is no reason against any of them.",
}


def prompt_of(argument: str) -> str:
    """The argument, or for `-` all of stdin as it is. Raises `SettingError` for what isn't text."""
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise SettingError("PROMPT", argument, "UTF-8 text on stdin") from None


def body_of(prompt: str, *, chat: bool, max_tokens: int | None) -> dict[str, Any]:
    """A chat of one user message, or a completion of the prompt as it is; without the model."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


async def ask_route(client: httpx.AsyncClient, model: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `POST /route`; `model` None: the first one served there. Raises `BrimfulError`."""
    base_url = str(client.base_url).rstrip("/")
    try:
        content = json.dumps({"model": model or await _first_model(client), **body})
        answer = await client.post("/route", content=content, headers={"content-type": "application/json"})
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise no_answer(base_url, error) from None
    if answer.is_success and isinstance(found, dict) and "candidates" in found:
        return found
    raise refusal(found, f"{base_url}/route isn't brimful's")


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("/v1/models")
    models = answer.raise_for_status().json()["data"]
    if not models:
        raise UnknownModel(f"{client.base_url} serves no model")
    return str(models[0]["id"])


def one_line(answer: Mapping[str, Any]) -> str:
    """Replica, reason and expected cost."""
    cost_s = answer["cost_s"]
    cost = "" if cost_s is None else f", expected to cost {_seconds(cost_s)}"
    return f"replica {answer['replica']} ({answer['reason']}){cost}"


def show_explanation(answer: Mapping[str, Any], out: RichConsole) -> None:
    """The request, a table of the candidates, best first, and in words why the first one won."""
    out.print(_request_line(answer), highlight=False)
    out.print(_table(answer))
    hidden = answer["num_looked_at"] - len(answer["candidates"])
    if hidden > 0:
        out.print(f"{hidden} more candidates aren't shown", highlight=False)
    out.print(why(answer), highlight=False)
    number = answer["routers"]["number"]
    out.print(
        f"As ingress {answer['ingress']} sees it: it knows the reports that reached it and its own requests; "
        f"about {number:.1f} routers seem to send to these replicas.",
        highlight=False,
    )


def why(answer: Mapping[str, Any]) -> str:
    """One or two sentences: why the winner and not the runner-up."""
    reason, policy = answer["reason"], answer["policy"]
    scored = [candidate for candidate in answer["candidates"] if candidate["total"] is not None]
    winner = scored[0]
    name = winner["replica_id"]
    if len(scored) == 1:
        only = "the only replica" if answer["num_looked_at"] == 1 else "the only one that takes requests now"
        return f"{name} is {only}."
    passed_over = f"{PASSED_OVER[reason]} " if reason in PASSED_OVER else ""
    second = scored[1]
    other = second["replica_id"]
    if reason == "tie":
        return f"{name} and {other} score the same, {winner['total']:.3f} and {second['total']:.3f}: they take turns."
    if policy == "session_affinity" and answer.get("session_by") == "request":
        return (
            f"{passed_over}session_affinity: the request names no session and its prompt is shorter than a block, so "
            f"it may go anywhere: to {name}, or to another one when it is sent."
        )
    if policy in ("round_robin", "session_affinity"):
        place = "is next in turn" if policy == "round_robin" else "is where the session belongs"
        return f"{passed_over}{policy}: {name} {place}, {other} comes after it."
    if winner["cost"] is not None and (reason == "cost_s" or passed_over):
        return passed_over + _why_by_cost(winner, second)
    by = reason if reason in winner["scores"] else next(iter(winner["scores"]))
    ours, theirs = (one["scores"][by]["score"] for one in (winner, second))
    return f"{passed_over}{name} scores {ours:.3f} in {by} and {other} {theirs:.3f}."


def _why_by_cost(winner: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    ours, theirs = winner["cost"], second["cost"]
    text = f"{winner['replica_id']} is expected to cost {_seconds(ours['total_s'])}, "
    text += f"{second['replica_id']} {_seconds(theirs['total_s'])}"
    if second["stale"] and not winner["stale"]:
        return f"{text} by its last report, which is too old to be believed."
    # What is below the level counts as level: only their sum tells replicas apart.
    gains = {name: theirs[name] - ours[name] for name in COST_WORDS if name not in ("load_s", "level_s")}
    gains["load_s"] = theirs["load_s"] + theirs["level_s"] - ours["load_s"] - ours["level_s"]
    largest = max(gains, key=gains.__getitem__)
    if gains[largest] <= 0:
        return f"{text}."
    text += f"; the largest part of the difference is {COST_WORDS[largest]} ({_seconds(gains[largest])} less)"
    if largest == "own_prefill_s" and winner["cached_tokens"]:
        text += (
            f": {winner['cached_tokens']} tokens of the prompt are cached there, instead of {second['cached_tokens']}"
        )
    return f"{text}."


def _request_line(answer: Mapping[str, Any]) -> str:
    blocks, most = answer["prompt_blocks"], max(answer["cached_blocks"].values(), default=0)
    cached = f"; {answer['num_caching']} replicas hold some of its {blocks} blocks, up to {most}" if most else ""
    looked_at = f"{answer['num_looked_at']} of {answer['num_replicas']} replicas looked at"
    return (
        f"{answer['model']}: {answer['prompt_tokens']} tokens of prompt, {answer['output_tokens']} expected to be "
        f"generated{cached}. {one_line(answer)}, by {answer['policy']}; {looked_at}."
    )


def _table(answer: Mapping[str, Any]) -> Table:
    """Parts of the cost that are 0 for all are left out."""
    candidates = answer["candidates"]
    costs = [candidate["cost"] for candidate in candidates if candidate["cost"] is not None]
    parts = [name for name in COST_WORDS if costs and (name in ALWAYS_SHOWN or any(cost[name] for cost in costs))]
    scorers = list(candidates[0]["scores"])
    others = [name for name in scorers if name != "cost_s" or not costs]
    columns = ["replica", "score", *(["cost s"] if costs else []), *(COST_WORDS[name] for name in parts)]
    columns += [*(f"{name} x{candidates[0]['scores'][name]['weight']:.2f}" for name in others if len(scorers) > 1)]
    columns += ["run", "wait", "ours", "KV used", "cached tokens", "age s", "note"]
    table = Table(box=SIMPLE_HEAD, padding=0)
    rows = [_cells(candidate, parts, others if len(scorers) > 1 else [], bool(costs)) for candidate in candidates]
    for column, *cells in zip(columns, *rows, strict=True):
        justify: Literal["left", "right"] = "left" if column in ("replica", "note") else "right"
        longest_word = max(len(word) for text in (column, *cells, "-") for word in text.split())
        table.add_column(column.replace(" ", "\n"), justify=justify, min_width=longest_word)
    for row in rows:
        table.add_row(*row)
    return table


def _cells(candidate: Mapping[str, Any], parts: list[str], scorers: list[str], with_costs: bool) -> list[str]:
    cost, scores = candidate["cost"], candidate["scores"]
    used = candidate["kv_usage_ratio"]
    return [
        candidate["replica_id"],
        _number(candidate["total"]),
        *([_number(None if cost is None else cost["total_s"])] if with_costs else []),
        *[_number(None if cost is None else cost[name]) for name in parts],
        *[_number(scores[name]["score"] if name in scores else None) for name in scorers],
        _count(candidate["running"]),
        _count(candidate["waiting"]),
        str(candidate["own_in_flight"]),
        "-" if used is None else f"{used:.0%}",
        str(candidate["cached_tokens"]),
        "-" if candidate["report_age_s"] is None else f"{candidate['report_age_s']:.1f}",
        _note(candidate),
    ]


def _note(candidate: Mapping[str, Any]) -> str:
    notes = ["draining"] if candidate["draining"] else []
    if candidate["kept_out_by"] not in (None, "draining"):
        notes.append(str(candidate["kept_out_by"]).replace("_", " "))
    if candidate["stale"]:
        notes.append("stale" if candidate["running"] is not None else "silent")
    if candidate["ramp"] < 1:
        notes.append(f"{candidate['ramp']:.0%} warm")
    if candidate["home"]:
        notes.append("home")
    return ", ".join(notes)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float) -> str:
    return f"{value:.3f} s"
