"""`brimful status`, and the summary that `brimful serve` prints: what `/status` says, for people."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from deployments.cli.no_answer import check_port, no_answer
from deployments.config import ServeConfig
from replica.errors import Unavailable

TIMEOUT_S = 10.0
# The load; what the waiting wait for; how many tokens the last step had; then the two limits of a step.
COLUMNS = (
    *("replica", "state", "running", "waiting", "wait for", "step tokens"),
    *("KV free", "KV used", "max seqs", "max tokens"),
)
LEFT_ALIGNED = ("replica", "state", "wait for")


async def fetch_status(base_url: str) -> dict[str, Any]:
    """The JSON of `/status`. Raises `Unavailable` when nobody answers there."""
    check_port(base_url)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            answer = await client.get("/status")
            answer.raise_for_status()
            status = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise no_answer(base_url, error) from None
    if not isinstance(status, dict) or "models" not in status:
        raise Unavailable(f"{base_url}/status isn't brimful's")
    return status


def show_status(status: dict[str, Any], out: RichConsole) -> None:
    """One table a model: a row a replica, with its load and its limits."""
    for model in status["models"]:
        replicas = model["up"]
        title = f"{model['name']} on {model['route']}: {len(replicas)} of {model['replicas']} replicas up"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        rows = [_cells(replica) for replica in replicas]
        for column, *cells in zip(COLUMNS, *rows, strict=True):
            justify: Literal["left", "right"] = "left" if column in LEFT_ALIGNED else "right"
            # Narrow terminals break lines between words: no word is cut.
            longest_word = max(len(word) for text in (column, *cells) for word in text.split())
            table.add_column(column.replace(" ", "\n"), justify=justify, min_width=longest_word)
        for row in rows:
            table.add_row(*row)
        out.print(table)


def program_name(started_as: str, on_path: str | None, here: Path) -> str:
    """How this program is called from the folder `here`: to be pasted into a shell.

    `started_as` is its file; `on_path` the file that the word `brimful` runs, if any.
    """
    file = Path(started_as).absolute()
    if file.name != "brimful":
        return f"{shlex.quote(sys.executable)} -m deployments.cli"
    if on_path is not None and Path(on_path).absolute() == file:
        return file.name
    return shlex.quote(str(file.relative_to(here) if file.is_relative_to(here) else file))


def summary(status: dict[str, Any], base_url: str, config: ServeConfig, program: str) -> str:
    """What a newcomer needs next: the URL, commands to paste (`program` is this one), and how much fits in."""
    lines = ["", f"brimful is ready at {base_url}", ""]
    for model in status["models"]:
        loads = [replica["load"] for replica in model["up"]]
        size = f"{len(model['up'])} replica{'s' * (len(model['up']) != 1)}"
        if loads:
            first = loads[0]
            size += (
                f", each with {first['num_blocks_total']} KV blocks of {first['block_size']} tokens,"
                f" {first['max_num_seqs']} sequences and {first['max_num_batched_tokens']} tokens in a step"
            )
        lines.append(f"  {model['name']}: {size}")
    model = config.app.models[0]
    question = {"model": model.name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    body = json.dumps(question | {"temperature": 0, "max_tokens": 32})
    url = base_url + model.route.rstrip("/") + "/v1/chat/completions"
    lines += ["", f"  curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"]
    lines += ["", f"  {program} chat --url {base_url}", f"  {program} status --url {base_url}", ""]
    return "\n".join(lines)


def _cells(replica: dict[str, Any]) -> list[str]:
    load, step = replica["load"], replica["last_step"]
    reasons = step["num_waiting_by_reason"] if step else {}
    total = load["num_blocks_total"]
    free = load["num_blocks_free"] + load["num_blocks_cached"]
    return [
        replica["replica_id"],
        replica["state"],
        str(load["num_running"]),
        str(load["num_waiting"]),
        ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count) or "-",
        str(step["num_tokens"]) if step else "-",
        f"{free}/{total}",
        f"{(total - free) / total:.0%}" if total else "-",
        str(load["max_num_seqs"]),
        str(load["max_num_batched_tokens"]),
    ]
