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


GROUPS = "sys/fs/cgroup"


def v1(quota: int, folder: str = "cpu") -> dict[str, str]:
    """A quota of version 1 in hundredths of a core."""
    path = f"{GROUPS}/{folder}/cpu.cfs_"
    return {f"{path}quota_us": str(quota * 500), f"{path}period_us": "50000"}


def v2(**quotas: int) -> dict[str, str]:
    """Quotas of version 2 in hundredths of a core, by the group's path with _ for /; `root` is the root."""
    paths = {name: "" if name == "root" else f"/{name.replace('_', '/')}" for name in quotas}
    return {f"{GROUPS}{paths[name]}/cpu.max": f"{quota * 1000} 100000" for name, quota in quotas.items()}


NONE = {f"{GROUPS}/cpu.max": "max 100000"}
CORES = {
    "v2, none": ("0::/", NONE, ALLOWED),
    "v2, whole": ("0::/", v2(root=300), 3),
    "v2, a fraction counts as one": ("0::/", v2(root=50), 1),
    "v2, a fraction is rounded up": ("0::/", v2(root=150), 2),
    "v2, more than available": ("0::/", v2(root=6400), ALLOWED),
    "v2, of parent groups": ("0::/pods/a/b", NONE | v2(pods_a=500, pods=200), 2),
    "v2, not of a neighbour": ("0::/pods/a", v2(pods_b=100), ALLOWED),
    "v2, the path is the host's": ("0::/kubepods/x", v2(root=200), 2),
    "v2, the path is outside": ("0::/../../x", v2(root=200), 2),
    "v2 beside v1": ("1:name=systemd:/\n0::/", v2(unified=200), 2),
    "v1": ("4:cpu:/", v1(250), 3),
    "v1, none": ("4:cpu:/", v1(250) | {f"{GROUPS}/cpu/cpu.cfs_quota_us": "-1"}, ALLOWED),
    "v1, several controllers": ("4:cpu,cpuacct:/x/a/b\n3:memory:/other", v1(400, "cpu,cpuacct/x/a"), 4),
    "v1, in another order": ("4:cpuacct,cpu:/docker/a", v1(400), 4),
    "v1, not of other controllers": ("4:cpuset:/", v1(100), ALLOWED),
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
V2 = "memory.max"
MEMORY = {
    "other groups only": ("4:cpu:/", {}, MACHINE),
    "v2, none": ("0::/", {V2: "max"}, MACHINE),
    "v2, of a parent": ("0::/pods/a", {f"pods/a/{V2}": "max", f"pods/{V2}": str(3 << 30)}, 3 << 30),
    "v2, more than the machine": ("0::/", {V2: str(1 << 50)}, MACHINE),
    "v1": ("4:memory:/a", {"memory/a/memory.limit_in_bytes": str(1 << 30)}, 1 << 30),
    "v1, none": ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
}


@pytest.mark.parametrize(("groups", "files", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory_is_the_minimum_of_machine_and_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    meminfo = f"MemFree: 1 kB\nMemTotal:       {MACHINE // 1024} kB"
    limits = {f"{GROUPS}/{name}": text for name, text in files.items()}
    assert machine.available_bytes(tree(tmp_path, groups, {"proc/meminfo": meminfo, **limits})) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("4:cpu:/", {}, 2 << 30),
        ("0::/", {V2: "5000", "memory.current": "3000", "memory.stat": "anon 9\ninactive_file 100"}, 2100),
        ("0::/", {V2: "5000", "memory.current": "6000", "memory.stat": "anon 0"}, 0),
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "total_inactive_file 50",
            },
            2050,
        ),
    ],
    ids=["machine", "v2", "v2, exceeded", "v1"],
)
def test_free_memory_is_what_machine_and_groups_leave(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    limits = {f"{GROUPS}/{name}": text for name, text in files.items()}
    root = tree(tmp_path, groups, {"proc/meminfo": f"MemAvailable: {2 << 20} kB", **limits})
    assert machine.free_bytes(root) == expected


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
