"""Memory that may be taken: the machine's or a container's, whichever is less, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from replica.model.host_memory import available_bytes

_MB = 1 << 20


def _write(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def _available(tmp_path: Path, membership: str) -> int:
    (tmp_path / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    return available_bytes(tmp_path / "proc", tmp_path / "cgroup")


@pytest.fixture
def unlimited(tmp_path: Path) -> int:
    """What the machine itself has; the tests' limits lie far below it."""
    found = available_bytes(tmp_path / "none", tmp_path / "none")
    assert found > 500 * _MB
    return found


def test_without_control_groups_the_machine_decides(tmp_path: Path, unlimited: int) -> None:
    assert _available(tmp_path, "") == pytest.approx(unlimited, rel=0.2)
    _write(tmp_path / "cgroup", memory__max="max", memory__current=5 * _MB)
    assert _available(tmp_path, "0::/\n") == pytest.approx(unlimited, rel=0.2)


@pytest.mark.usefixtures("unlimited")
def test_a_limit_of_version_2_counts_less_what_the_kernel_gives_up(tmp_path: Path) -> None:
    _write(
        tmp_path / "cgroup" / "pod" / "box",
        memory__max=100 * _MB,
        memory__current=70 * _MB,
        memory__stat=f"anon {20 * _MB}\nfile {45 * _MB}\nfile_mapped {30 * _MB}\nshmem {5 * _MB}\n"
        f"slab_reclaimable {2 * _MB}",
    )
    # 30 free, 45 - 30 - 5 of cached files that nobody maps, 2 of slabs.
    assert _available(tmp_path, "0::/pod/box\n") == 42 * _MB


@pytest.mark.usefixtures("unlimited")
def test_the_tightest_level_counts(tmp_path: Path) -> None:
    _write(tmp_path / "cgroup" / "pod" / "box", memory__max=100 * _MB, memory__current=10 * _MB)
    _write(tmp_path / "cgroup" / "pod", memory__max=90 * _MB, memory__current=60 * _MB)
    assert _available(tmp_path, "0::/pod/box\n") == 30 * _MB


@pytest.mark.usefixtures("unlimited")
def test_a_limit_of_version_1_counts_too(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "memory" / "docker" / "box"
    _write(
        group,
        memory__limit_in_bytes=100 * _MB,
        memory__usage_in_bytes=60 * _MB,
        memory__stat=f"cache 1\ntotal_cache {20 * _MB}\ntotal_mapped_file {8 * _MB}\ntotal_shmem {2 * _MB}",
    )
    _write(tmp_path / "cgroup" / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=0)
    assert _available(tmp_path, "5:cpu:/x\n4:memory:/docker/box\n0::/\n") == 50 * _MB


@pytest.mark.usefixtures("unlimited")
def test_inside_a_container_whose_path_is_the_hosts_the_root_is_its_own_group(tmp_path: Path) -> None:
    _write(tmp_path / "cgroup" / "memory", memory__limit_in_bytes=80 * _MB, memory__usage_in_bytes=20 * _MB)
    assert _available(tmp_path, "4:memory:/docker/not/seen/here\n") == 60 * _MB


@pytest.mark.usefixtures("unlimited")
def test_a_limit_that_is_passed_leaves_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "cgroup", memory__max=10 * _MB, memory__current=12 * _MB)
    assert _available(tmp_path, "0::/\n") == 0
