"""Cores that a process may use, by affinity and quota, and their division among workers."""

import os
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.server import cores

ALLOWED = 8


@pytest.fixture(autouse=True)
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
TREES = {
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


@pytest.mark.parametrize(("groups", "files", "expected"), TREES.values(), ids=TREES.keys())
def test_the_minimum_of_affinity_and_quotas(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert cores.available(tree(tmp_path, groups, files)) == expected


def test_affinity_applies_without_control_groups(tmp_path: Path) -> None:
    assert cores.available(tmp_path) == ALLOWED


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
    assert [cores.share(allowed, workers, worker) for worker in range(workers)] == expected


@given(count=st.integers(1, 256), workers=st.integers(1, 64))
def test_every_core_is_used_and_shares_differ_by_at_most_one(count: int, workers: int) -> None:
    parts = [cores.share(range(count), workers, worker) for worker in range(workers)]
    sizes = {len(part) for part in parts}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if workers <= count:
        assert list(chain(*parts)) == list(range(count))
    else:
        users = [sum(core in part for part in parts) for core in range(count)]
        assert max(users) - min(users) <= 1
