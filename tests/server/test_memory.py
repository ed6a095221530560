"""Memory that a process may use, by machine and control group."""

from pathlib import Path

import pytest

from attention_serving.server import memory
from tests.server.test_cores import tree

MACHINE = 24 << 30
TREES = {
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


@pytest.mark.parametrize(("groups", "files", "expected"), TREES.values(), ids=TREES)
def test_the_minimum_of_machine_and_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    meminfo = f"MemFree: 1 kB\nMemTotal:       {MACHINE // 1024} kB"
    root = tree(tmp_path, groups, {"proc/meminfo": meminfo, **files})
    assert memory.available_bytes(root) == expected


def test_this_machine_has_memory() -> None:
    assert memory.available_bytes() > 1 << 28
