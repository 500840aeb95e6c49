"""Results on disk: named by date and machine, without anything that names a place or a person."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from bench.engine_speed import results

ON = {"cpu": "AMD EPYC 7B13", "family": "25/1", "cores": 2, "flags": ["avx2"], "python": "3.11.2"}


def test_a_run_is_kept_as_json_and_as_markdown(tmp_path: Path) -> None:
    document = {
        "bench": "engine",
        "title": "A title",
        "command": "make it",
        "date": "2026-11-30",
        "machine": ON,
        "versions": {"torch": "2.13.0"},
    }
    paths = results.save(tmp_path, document, ["| a |", "|---|"], "before")
    name = "2026-11-30-amd-epyc-7b13-2-cores-engine-before"
    assert paths == [tmp_path / f"{name}.json", tmp_path / f"{name}.md"]
    assert json.loads(paths[0].read_text()) == document
    assert paths[1].read_text().splitlines() == [
        "# A title",
        "",
        "2026-11-30, AMD EPYC 7B13 (family/model 25/1, avx2), 2 cores, Python 3.11.2, torch 2.13.0. "
        "Command: `make it`.",
        "",
        "| a |",
        "|---|",
    ]


def test_the_machine_is_described_without_its_name() -> None:
    found = results.machine()
    assert found["cores"] >= 1
    assert found["cpu"]
    assert platform.node() not in json.dumps(found)


def test_versions_are_those_of_our_side() -> None:
    assert {"torch", "transformers", "numpy"} <= set(results.versions())
