"""CPU time of a running service, by what its processes are for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil

REST = "ray and the command"


class Process(NamedTuple):
    """`title`: its command line, which Ray's processes replace by what they are."""

    pid: int
    parent_pid: int
    title: str
    cpu_seconds: float


def cpu_by_kind(root_pid: int) -> dict[str, float]:
    """CPU seconds so far of `brimful serve` and all that it started: proxy, ingress, replica, engine, the rest."""
    found = list[Process]()
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(root_pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                title = " ".join(process.cmdline())
                found.append(Process(process.pid, process.ppid(), title, times.user + times.system))
    return sums(found)


def sums(processes: Iterable[Process]) -> dict[str, float]:
    """By kind. What a replica started is its engine."""
    kinds = {process.pid: kind_of(process.title) for process in processes}
    total = dict.fromkeys(("engine", "replica", "ingress", "proxy", REST), 0.0)
    for process in processes:
        kind = "engine" if kinds.get(process.parent_pid) in ("replica", "engine") else kinds[process.pid]
        kinds[process.pid] = kind
        total[kind] += process.cpu_seconds
    return total


def kind_of(title: str) -> str:
    if title.startswith("ray::ProxyActor"):
        return "proxy"
    if title.startswith("ray::ServeReplica:"):
        return "ingress" if ":ingress" in title else "replica"
    return REST
