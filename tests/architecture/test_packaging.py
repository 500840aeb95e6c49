"""What is installed is complete: the files beside the code travel in the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree_rules import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".md", ".yaml", ".json"}


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages_and_the_licence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    ours = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SUFFIXES]
    missing = {path.relative_to(ROOT).as_posix() for path in ours if "__pycache__" not in path.parts} - packed
    assert missing == set()
    assert any(name.endswith("licenses/LICENSE") for name in packed)
