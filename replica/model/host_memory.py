"""How much memory this process may still take: what the machine has left, or its container, whichever is less. And
which errors say that there is no more.

A container's limit doesn't show in the machine's numbers, and who passes it is killed without a word. Both versions
of control groups are read, at every level from this process's own group up to the root that it sees:

    left of a group     limit - usage + what the kernel gives up before it kills (cached files that nobody maps, slabs)
    left of the machine available - files that this process maps (its weights count as available, but every step
                        reads them)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes; 0 when a limit is passed already."""
    machine = psutil.virtual_memory().available - psutil.Process().memory_info().shared
    return max(min([machine, *_left_of_groups(proc, cgroups)]), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host or of a device. PyTorch's CPU allocator raises an error of no kind of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _left_of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # a system without control groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, files = (cgroups, cgroups / "unified"), _V2
        elif "memory" in controllers.split(","):
            roots, files = (cgroups / controllers, cgroups / "memory"), _V1
        else:
            continue
        for folder in _levels(roots, path):
            left = _left_of_group(folder, *files)
            if left is not None:
                yield left


# Limit, usage, and the names in memory.stat of: cached files, those of them that are mapped, those that only look like
# files (shared memory), slabs that can be given up.
_V2 = ("memory.max", "memory.current", ("file", "file_mapped", "shmem", "slab_reclaimable"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache", "total_mapped_file", "total_shmem", ""))


def _levels(roots: tuple[Path, ...], path: str) -> Iterator[Path]:
    """The group's folder and those above it. Inside a container its path may not exist: then the root is its own."""
    for root in roots:
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _left_of_group(folder: Path, limit_file: str, usage_file: str, names: tuple[str, str, str, str]) -> int | None:
    """None where the group has no limit, or doesn't exist."""
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or usage is None:
        return None
    cached, mapped, shared, slabs = (_statistics(folder).get(name, 0) for name in names)
    return limit - usage + max(cached - mapped - shared, 0) + slabs


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None


def _statistics(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
