"""Every gate of `make check` is planted with a violation in a small copy of the tree and must name it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree_rules import PACKAGES, violations

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages' frame (`__init__` files and borders) with the real gate settings; clean under every gate."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in (*PACKAGES, "tests"):
        for init in (ROOT / package).rglob("__init__.py"):
            copied = tmp_path / init.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text("", encoding="utf-8")
            (copied.parent / "README.md").write_text("What lives here.\n", encoding="utf-8")
    contract = [f"replica/model/{name}.py" for name in ("api", "fake", "late")]
    for border in (*contract, "replica/model_card.py", "replica/metrics.py", "router/serve_router.py"):
        (tmp_path / border).write_text("", encoding="utf-8")
    return tmp_path


def run(copy: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=copy, capture_output=True, text=True, check=False, timeout=110
    )
    return done.returncode, done.stdout + done.stderr


def plant(copy: Path, name: str, text: str) -> None:
    path = copy / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_format_gate_names_an_unformatted_file(copy: Path) -> None:
    assert run(copy, "ruff", "format", "--check", ".")[0] == 0
    plant(copy, "replica/planted.py", "x = {  'a':1 }\n")
    code, output = run(copy, "ruff", "format", "--check", ".")
    assert code == 1
    assert "replica/planted.py" in output


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import os\n", "F401"),
        ("def f() -> None:\n    try:\n        g()\n    except Exception:\n        pass\n", "BLE001"),
        ("print('debugging')\n", "T201"),
    ],
)
def test_lint_gate_names_the_broken_rule(copy: Path, text: str, rule: str) -> None:
    assert run(copy, "ruff", "check", ".")[0] == 0
    plant(copy, "router/planted.py", text)
    code, output = run(copy, "ruff", "check", "--output-format", "concise", ".")
    assert code == 1
    assert f"router/planted.py:{4 if rule == 'BLE001' else 1}:" in output
    assert rule in output


def test_type_gate_names_an_untyped_function_and_a_wrong_type(copy: Path) -> None:
    plant(copy, "replica/planted.py", "def f(x):\n    return x\n\n\nnumber: int = 'text'\n")
    code, output = run(copy, "mypy")
    assert code == 1
    assert "replica/planted.py:1: error: Function is missing a type annotation" in output
    assert "replica/planted.py:5: error: Incompatible types in assignment" in output


@pytest.fixture
def wired(copy: Path) -> Path:
    """The copy with imports that the contracts allow: torch, ray and fastapi in their places; the command line."""
    plant(copy, "replica/model/planted_runner.py", "import torch\n")
    plant(copy, "replica/scheduler/admission.py", "import replica.model.api\n")
    plant(copy, "router/serve_router.py", "import ray\n")
    plant(copy, "deployments/planted_edge.py", "import fastapi\n")
    plant(copy, "deployments/cli/commands.py", "import bench.scorers\nimport dashboards.publish\n")
    plant(copy, "deployments/cli/__init__.py", "")
    plant(copy, "dashboards/publish.py", "import replica.metrics\n")
    plant(copy, "bench/scorers.py", "")
    return copy


def test_import_gate_lets_the_allowed_imports_be(wired: Path) -> None:
    code, output = run(wired, "lint-imports", "--no-cache")
    assert code == 0, output


@pytest.mark.parametrize(
    ("name", "text", "contract"),
    [
        ("replica/planted.py", "import router\n", "Dependencies point one way"),
        ("router/planted.py", "import deployments\n", "Dependencies point one way"),
        ("deployments/planted.py", "import bench\n", "Only the command line imports bench"),
        (
            "deployments/planted.py",
            "def f() -> None:\n    import bench.scorers\n",
            "Only the command line imports bench",
        ),
        ("bench/planted.py", "import deployments.planted_edge\n", "bench imports only the pure parts"),
        ("bench/planted.py", "import dashboards\n", "bench and dashboards stay apart"),
        ("bench/planted.py", "import replica.model.planted_runner\n", "bench loads no torch"),
        ("dashboards/planted.py", "import replica.model_card\n", "dashboards reads only metric tables"),
        ("replica/planted.py", "import tests\n", "Nothing imports tests"),
        (
            "replica/planted.py",
            "def f() -> None:\n    import torch\n",
            "torch and transformers only under replica.model",
        ),
        ("replica/scheduler/planted.py", "import replica.model.planted_runner\n", "load no torch"),
        ("replica/model/fake.py", "import replica.model.planted_runner\n", "load no torch"),
        ("replica/model/late.py", "import replica.model.planted_runner\n", "load no torch"),
        (
            "replica/scheduler/planted.py",
            "import replica.model.planted_runner\n",
            "scheduler knows only the contract",
        ),
        ("replica/scheduler/planted.py", "import replica.text\n", "scheduler knows only the contract"),
        ("router/planted.py", "import ray\n", "ray only under deployments"),
        ("replica/planted.py", "import fastapi\n", "fastapi only under deployments"),
    ],
)
def test_import_gate_breaks_the_contract(wired: Path, name: str, text: str, contract: str) -> None:
    plant(wired, name, text)
    code, output = run(wired, "lint-imports", "--no-cache")
    assert code == 1
    assert name.removesuffix(".py").replace("/", ".") in output
    broken = " ".join(output.partition("Broken contracts")[2].split())
    assert contract in broken


LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * 60

TREE_VIOLATIONS = {
    "file too long": ("replica/planted.py", "x = 1\n" * 331, "replica/planted.py:1: 331 lines; a file has at most 330"),
    "function too long": ("bench/planted.py", LONG_FUNCTION, "bench/planted.py:1: long has 61 lines"),
    "empty name": ("router/route_utils.py", "", "router/route_utils.py:1: 'utils' says nothing"),
    "empty folder name": ("router/misc/__init__.py", "", "router/misc/__init__.py:1: 'misc' says nothing"),
    "folder without README": ("router/pickers/__init__.py", "", "router/pickers:1: this folder has no README.md"),
    "README too long": ("router/README.md", "line\n" * 41, "router/README.md:1: 41 lines"),
    "machine path": ("tests/planted.py", "x = '/home/someone/models'\n", "tests/planted.py:1: names an absolute path"),
    "temporary path": ("replica/planted.py", "x = '/tmp/ray'\n", "replica/planted.py:1: names an absolute path"),
    "outside folder": ("README.md", "See ../shared/design.md\n", "README.md:1: names a folder outside the project"),
    "registry": ("Makefile", "pip install -i https://pypi.org/simple x\n", "Makefile:1: names a package registry"),
    "environ": ("replica/planted.py", "import os\n\nx = os.environ['X']\n", "replica/planted.py:3: touches the env"),
    "stale exception": ("replica/model/fetch.py", "x = 1\n", "replica/model/fetch.py:1: doesn't touch the environment"),
    "getenv": ("router/planted.py", "from os import getenv\n", "router/planted.py:1: touches the environment"),
}


@pytest.mark.parametrize("case", TREE_VIOLATIONS)
def test_tree_gate_names_the_place(copy: Path, case: str) -> None:
    name, text, expected = TREE_VIOLATIONS[case]
    clean = [line for line in violations(copy) if not line.startswith("tests")]
    plant(copy, name, text)
    found = [line for line in violations(copy) if line not in clean]
    assert clean == []
    assert any(line.startswith(expected) for line in found), found


def test_tree_gate_lets_the_loader_and_containers_be(copy: Path) -> None:
    before = violations(copy)
    plant(copy, "deployments/config.py", "import os\n\nx = os.environ\n")
    plant(copy, "k8s/base/rayservice.yaml", "mountPath: /home/ray\n")
    plant(copy, "k8s/README.md", "What lives here.\n")
    plant(copy, "replica/urls.py", "x = 'http://localhost/workloads'\ny = __file__ + '/work-items'\n")
    assert violations(copy) == before


def test_tree_gate_is_a_command_that_fails(copy: Path) -> None:
    plant(copy, "router/route_utils.py", "")
    done = subprocess.run(
        [sys.executable, "-m", "tests.architecture.tree_rules", str(copy)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "router/route_utils.py:1: 'utils' says nothing; name the module after what it holds\n" in done.stdout
