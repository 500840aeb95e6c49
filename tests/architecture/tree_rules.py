"""Rules about the shape of the tree that no linter knows: sizes, READMEs, names, hard-wired places, environment reads.

`python -m tests.architecture.tree_rules [root]` prints one line a violation and exits 1 when there is one: the last
part of `make check`. Every rule is a pure function of files, so that a test can plant a violation in a copy.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("deployments", "replica", "router", "dashboards", "bench")
ROOMS = (*PACKAGES, "k8s", "tests")

MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 40

FORBIDDEN_WORDS = {
    *("manager", "managers", "util", "utils", "helper", "helpers"),
    *("data", "info", "misc"),
}

ENVIRONMENT_READERS = ("deployments/cli/", "deployments/cli.py", "deployments/config.py")
"""The command line and the one loader. Everything else gets its settings passed in."""

ENVIRONMENT_EXCEPTIONS = {
    "replica/child_process.py": "hands the environment on to our child processes, with how their CPU threads wait",
    "replica/model/cache_folder.py": "XDG_CACHE_HOME is the user's own choice for all programs, no setting of ours",
    "replica/model/fetch.py": "hands the environment on to pip, with its temporary folder changed",
}
"""Path -> reason, for a file that must touch the environment all the same. One that doesn't may not be listed."""

_MACHINE_PATH = re.compile(r"(?<![\w.:/~$}*-])/(?:work|root|home|Users|tmp|mnt|opt/conda)(?![\w-])")
_SHARED_FOLDER = re.compile(r"\.\./shared\b")
_REGISTRY_HOST = re.compile(
    r"\b(?:(?:test\.)?pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian\.org|download\.pytorch\.org"
    r"|docker\.io|ghcr\.io|quay\.io|gcr\.io|nvcr\.io|index-url)"
)
_TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ".cfg", ".ini", ""}

CONTAINER_PATHS = ("k8s/", "dashboards/compose/")
"""Files about containers, where an absolute path is the image's, not some machine's."""

_RULES_THEMSELVES = ("tests/architecture/",)


def violations(root: Path) -> list[str]:
    """All broken rules under `root` as `path:line: what is wrong`, sorted."""
    found: list[str] = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        found += [f"{name}:{line}: {what}" for line, what in _places(name, text)]
        if path.suffix == ".py":
            found += [f"{name}:{line}: {what}" for line, what in _python_rules(name, text)]
        if path.name == "README.md" and path.parent != root and len(text.splitlines()) > MAX_README_LINES:
            found.append(f"{name}:1: {len(text.splitlines())} lines; a folder's README has at most {MAX_README_LINES}")
    found += _missing_readmes(root)
    return sorted(found)


def _files(root: Path) -> Iterator[Path]:
    """Text files of the project: the rooms and what lies at the top; no caches, no build output."""
    tops = [path for path in root.iterdir() if path.is_file()]
    inside = [path for room in ROOMS for path in (root / room).rglob("*") if path.is_file()]
    for path in sorted(tops + inside):
        hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts)
        if not hidden and path.suffix in _TEXT_SUFFIXES and path.name != "LICENSE":
            yield path


def _python_rules(name: str, text: str) -> Iterator[tuple[int, str]]:
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield 1, f"{num_lines} lines; a file has at most {MAX_FILE_LINES}"
    words = set(re.split(r"[_/.]", name)) & FORBIDDEN_WORDS
    if words:
        yield 1, f"'{min(words)}' says nothing; name the module after what it holds"
    tree = ast.parse(text, filename=name)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; a function has at most {MAX_FUNCTION_LINES}"
    if name.startswith(PACKAGES) and not name.startswith(ENVIRONMENT_READERS):
        lines = list(_environment_uses(tree))
        if name in ENVIRONMENT_EXCEPTIONS and not lines:
            yield 1, "doesn't touch the environment: take it off the exceptions of tests/architecture/tree_rules.py"
        for line in lines if name not in ENVIRONMENT_EXCEPTIONS else []:
            yield line, "touches the environment; pass the setting in (deployments/config.py is the loader)"


def _environment_uses(tree: ast.AST) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names):
            yield node.lineno


def _places(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Places that exist on one machine or at one company only."""
    if name.startswith(_RULES_THEMSELVES):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if _MACHINE_PATH.search(line) and not name.startswith(CONTAINER_PATHS):
            yield number, "names an absolute path of some machine"
        if _SHARED_FOLDER.search(line):
            yield number, "names a folder outside the project"
        if _REGISTRY_HOST.search(line):
            yield number, "names a package registry"


def _missing_readmes(root: Path) -> Iterator[str]:
    """Each package folder and the rooms without packages have one; tests have one at their top."""
    folders = {path.parent for package in PACKAGES for path in (root / package).rglob("*.py")}
    folders |= {root / room for room in ROOMS if (root / room).is_dir()}
    for folder in folders:
        if not (folder / "README.md").is_file():
            yield f"{folder.relative_to(root).as_posix()}:1: this folder has no README.md"


def main(argv: list[str]) -> int:
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parents[2]
    found = violations(root)
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
