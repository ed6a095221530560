"""What a process may use of its machine: cores by affinity and quota, and memory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_serving.server import machine

ALLOWED, MACHINE, FREE = 8, 24 << 30, 2 << 30
MAX, NOW, STAT = "memory.max", "memory.current", "memory.stat"
MEMORY = "memory/memory"


def v1(quota: int, folder: str = "cpu") -> dict[str, str]:
    """A quota of version 1 in hundredths of a core."""
    return {f"{folder}/cpu.cfs_quota_us": str(quota * 500), f"{folder}/cpu.cfs_period_us": "50000"}


# The groups of a process, the files below /sys/fs/cgroup, and what the process may use.
CORES: dict[str, tuple[str, dict[str, str], int]] = {
    "no groups": ("", {}, ALLOWED),
    "v2, none": ("0::/", {"cpu.max": "max 100000"}, ALLOWED),
    "v2, whole": ("0::/", {"cpu.max": "300000 100000"}, 3),
    "v2, a fraction counts as one": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "v2, a fraction is rounded up": ("0::/", {"cpu.max": "150000 100000"}, 2),
    "v2, more than available": ("0::/", {"cpu.max": "6400000 100000"}, ALLOWED),
    "v2, parents": ("0::/a/b", {"cpu.max": "max 9", "a/cpu.max": "20 10", "a/b/cpu.max": "50 10"}, 2),
    "v2, not of a neighbour": ("0::/pods/a", {"pods/b/cpu.max": "100000 100000"}, ALLOWED),
    "v2, the path is the host's": ("0::/kubepods/x", {"cpu.max": "200000 100000"}, 2),
    "v2, the path is outside": ("0::/../../x", {"cpu.max": "200000 100000"}, 2),
    "v2 beside v1": ("1:name=systemd:/\n0::/", {"unified/cpu.max": "200000 100000"}, 2),
    "v1": ("4:cpu:/", v1(250), 3),
    "v1, none": ("4:cpu:/", v1(250) | {"cpu/cpu.cfs_quota_us": "-1"}, ALLOWED),
    "v1, several controllers": ("4:cpu,cpuacct:/x/a/b\n3:memory:/other", v1(400, "cpu,cpuacct/x/a"), 4),
    "v1, in another order": ("4:cpuacct,cpu:/docker/a", v1(400), 4),
    "v1, not of other controllers": ("4:cpuset:/", v1(100), ALLOWED),
}
BYTES: dict[str, tuple[str, dict[str, str], int]] = {
    "other groups only": ("4:cpu:/", {}, MACHINE),
    "v2, none": ("0::/", {MAX: "max"}, MACHINE),
    "v2, of a parent": ("0::/pods/a", {f"pods/a/{MAX}": "max", f"pods/{MAX}": "3000"}, 3000),
    "v2, more than the machine": ("0::/", {MAX: str(1 << 50)}, MACHINE),
    "v1": ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "3000"}, 3000),
    "v1, none": ("4:memory:/", {f"{MEMORY}.limit_in_bytes": "9223372036854771712"}, MACHINE),
}
V1_LIMIT = {f"{MEMORY}.limit_in_bytes": "5000", f"{MEMORY}.usage_in_bytes": "3000"}
LEFT: dict[str, tuple[str, dict[str, str], int]] = {
    "machine": ("4:cpu:/", {}, FREE),
    "v2": ("0::/", {MAX: "5000", NOW: "3000", STAT: "anon 9\ninactive_file 100"}, 2100),
    "v2, exceeded": ("0::/", {MAX: "5000", NOW: "6000", STAT: "anon 0"}, 0),
    "v1": ("4:memory:/", V1_LIMIT | {f"{MEMORY}.stat": "total_inactive_file 50"}, 2050),
}


@pytest.mark.parametrize(
    ("function", "groups", "files", "expected"),
    [
        pytest.param(function, *row, id=f"{function.__name__}, {name}")
        for function, rows in (
            (machine.available_cores, CORES),
            (machine.available_bytes, BYTES),
            (machine.free_bytes, LEFT),
        )
        for name, row in rows.items()
    ],
)
def test_the_least_of_the_limits_of_machine_and_groups_applies(
    function: Callable[[Path], int],
    groups: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALLOWED)))
    memory = f"MemTotal: {MACHINE >> 10} kB\nMemAvailable: {FREE >> 10} kB"
    own = {"proc/self/cgroup": groups} if groups else {}
    limits = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/meminfo": memory, **own, **limits}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert function(tmp_path) == expected
