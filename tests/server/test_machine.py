"""What a process may use of its machine: cores by affinity and quota, memory, and temporary files."""

import os
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.server import machine
from tests.server.samples import ROOT

ALLOWED = 8


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the number of cores, independently of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALLOWED)))


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with these control groups."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1 = "sys/fs/cgroup/cpu/cpu.cfs_"
V1_DEEP = "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_"
CORES = {
    "v2, none": ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, ALLOWED),
    "v2, whole": ("0::/", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
    "v2, a fraction counts as one": ("0::/", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
    "v2, a fraction is rounded up": ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "v2, no rounding error": ("0::/", {"sys/fs/cgroup/cpu.max": "30000 10000"}, 3),
    "v2, more than available": ("0::/", {"sys/fs/cgroup/cpu.max": "6400000 100000"}, ALLOWED),
    "v2, of parent groups": (
        "0::/pods/a/b",
        {
            "sys/fs/cgroup/pods/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/a/cpu.max": "500000 100000",
            "sys/fs/cgroup/pods/cpu.max": "200000 100000",
        },
        2,
    ),
    "v2, the minimum of all": (
        "0::/pods/a",
        {"sys/fs/cgroup/pods/a/cpu.max": "200000 100000", "sys/fs/cgroup/cpu.max": "400000 100000"},
        2,
    ),
    "v2, not of a neighbour": ("0::/pods/a", {"sys/fs/cgroup/pods/b/cpu.max": "100000 100000"}, ALLOWED),
    "v2, the path is the host's": ("0::/kubepods/x", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "v2, the path is outside": ("0::/../../x", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "v2 beside v1": ("1:name=systemd:/\n0::/", {"sys/fs/cgroup/unified/cpu.max": "200000 100000"}, 2),
    "v1": ("4:cpu:/", {f"{V1}quota_us": "250000", f"{V1}period_us": "100000"}, 3),
    "v1, none": ("4:cpu:/", {f"{V1}quota_us": "-1", f"{V1}period_us": "100000"}, ALLOWED),
    "v1, several controllers": (
        "4:cpu,cpuacct:/docker/a/b\n3:memory:/other",
        {f"{V1_DEEP}quota_us": "200000", f"{V1_DEEP}period_us": "50000"},
        4,
    ),
    "v1, in another order": (
        "4:cpuacct,cpu:/docker/a",
        {f"{V1}quota_us": "200000", f"{V1}period_us": "50000"},
        4,
    ),
    "v1, not of other controllers": (
        "4:cpuset:/",
        {f"{V1}quota_us": "100000", f"{V1}period_us": "100000"},
        ALLOWED,
    ),
}


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(("groups", "files", "expected"), CORES.values(), ids=CORES.keys())
def test_cores_are_the_minimum_of_affinity_and_quotas(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert machine.available_cores(tree(tmp_path, groups, files)) == expected


@pytest.mark.usefixtures("affinity")
def test_affinity_applies_without_control_groups(tmp_path: Path) -> None:
    assert machine.available_cores(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("allowed", "workers", "expected"),
    [
        ([3, 4], 1, [[3, 4]]),
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]]),
        ([5, 7], 2, [[5], [7]]),
        ([5, 7], 4, [[5], [5], [7], [7]]),
        ([2], 3, [[2], [2], [2]]),
    ],
    ids=["one worker", "even", "one left over", "one each", "two for each core", "one core"],
)
def test_cores_are_divided_among_workers(allowed: list[int], workers: int, expected: list[list[int]]) -> None:
    assert [machine.share_of_cores(allowed, workers, worker) for worker in range(workers)] == expected


@given(count=st.integers(1, 256), workers=st.integers(1, 64))
def test_every_core_is_used_and_shares_differ_by_at_most_one(count: int, workers: int) -> None:
    parts = [machine.share_of_cores(range(count), workers, worker) for worker in range(workers)]
    sizes = {len(part) for part in parts}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if workers <= count:
        assert list(chain(*parts)) == list(range(count))
    else:
        users = [sum(core in part for part in parts) for core in range(count)]
        assert max(users) - min(users) <= 1


MACHINE = 24 << 30
MEMORY = {
    "other groups only": ("4:cpu:/", {}, MACHINE),
    "v2, none": ("0::/", {"sys/fs/cgroup/memory.max": "max"}, MACHINE),
    "v2": ("0::/", {"sys/fs/cgroup/memory.max": str(2 << 30)}, 2 << 30),
    "v2, of a parent": (
        "0::/pods/a",
        {"sys/fs/cgroup/pods/a/memory.max": "max", "sys/fs/cgroup/pods/memory.max": str(3 << 30)},
        3 << 30,
    ),
    "v2, more than the machine": ("0::/", {"sys/fs/cgroup/memory.max": str(1 << 50)}, MACHINE),
    "v1": ("4:memory:/a", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(1 << 30)}, 1 << 30),
    "v1, none": (
        "4:memory:/",
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
        MACHINE,
    ),
}


@pytest.mark.parametrize(("groups", "files", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory_is_the_minimum_of_machine_and_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    meminfo = f"MemFree: 1 kB\nMemTotal:       {MACHINE // 1024} kB"
    root = tree(tmp_path, groups, {"proc/meminfo": meminfo, **files})
    assert machine.available_bytes(root) == expected


def test_this_machine_has_memory() -> None:
    assert machine.available_bytes() > 1 << 28


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_temporary_folder_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with machine.temporary_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "counter_0.db").touch()
    assert not list(temporary.iterdir())


def test_a_folder_in_use_stays(temporary: Path) -> None:
    with machine.temporary_folder() as first, machine.temporary_folder() as second:
        assert first.exists()
        assert second.exists()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    code = (
        "import os; from attention_serving.server.machine import temporary_folder\n"
        "with temporary_folder() as folder: (folder / 'counter_0.db').touch(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    (left,) = temporary.iterdir()
    with machine.temporary_folder() as folder:
        assert list(temporary.iterdir()) == [folder]
        assert folder != left


def test_links_and_files_with_such_a_name_are_left_alone(temporary: Path) -> None:
    other = temporary / "other"
    other.mkdir()
    (other / "kept").touch()
    (temporary / f"{machine.PREFIX}link").symlink_to(other, target_is_directory=True)
    (temporary / f"{machine.PREFIX}file").touch()
    with machine.temporary_folder():
        pass
    assert (other / "kept").exists()
    assert (temporary / f"{machine.PREFIX}link").is_symlink()
    assert (temporary / f"{machine.PREFIX}file").exists()
