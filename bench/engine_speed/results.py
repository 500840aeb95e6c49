"""What is kept of a run: one JSON document, and the same as Markdown for people. No host name, no user, no paths."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "numba", "numpy")


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, and what they can do that matters here."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.MULTILINE))
    flags = set(fields.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "family": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in wanted if flag in flags],
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of what our side computes with."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save(folder: Path, document: dict[str, Any], tables: Sequence[str], label: str = "") -> list[Path]:
    """Writes `<date>-<machine>-<bench>[-label].json` and `.md`; returns both paths. Raises OSError."""
    on = document["machine"]
    words = re.sub(r"[^a-z0-9]+", "-", f"{on['cpu']} {on['cores']} cores".lower()).strip("-")
    name = "-".join(part for part in (document["date"], words, document["bench"], label) if part)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    folder.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join([*_title(document), *tables, ""]), encoding="utf-8")
    return paths


def _title(document: dict[str, Any]) -> list[str]:
    on, with_ = document["machine"], document["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in with_.items())
    return [
        f"# {document['title']}",
        "",
        f"{document['date']}, {on['cpu']} (family/model {on['family']}, {', '.join(on['flags'])}), "
        f"{on['cores']} cores, Python {on['python']}, {packages}. Command: `{document['command']}`.",
        "",
    ]


def today() -> str:
    return date.today().isoformat()
