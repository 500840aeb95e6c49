"""pip's output as progress."""

from __future__ import annotations

from deployments.cli.install_progress import Progress

OUTPUT = """\
Looking in indexes: https://index.example/simple
Collecting ray[serve]>=2.60 (from brimful==0.1.0)
  Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl.metadata (20 kB)
  Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl (79.3 MB)
  Using cached torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)
Processing /wheels/jinja2-3.1.6-py3-none-any.whl (from brimful==0.1.0)
"""


def test_every_package_file_counts_once_and_the_newest_is_named() -> None:
    progress = Progress()
    seen = []
    for line in OUTPUT.splitlines(keepends=True):
        progress.take(line)
        seen.append((progress.num_packages, progress.doing))
    assert seen == [
        (0, "asking the package index"),
        (0, "asking the package index"),
        (0, "asking the package index"),
        (1, "fetching ray 2.60.0 (79.3 MB)"),
        (2, "fetching torch 2.13.0 (888.1 MB)"),
        (3, "fetching jinja2 3.1.6"),
    ]


def test_unpacking_is_said_with_the_number_of_packages() -> None:
    progress = Progress()
    progress.take("Installing collected packages: ray, torch, jinja2\n")
    assert progress.doing == "unpacking 3 packages (takes a minute or two)"
