"""How many cores this process may use, and how they are divided among workers."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path("/")
# Reads the quota of a control group from its folder: a number of cores, or None if there is no quota.
Reader = Callable[[Path], float | None]


def available(root: Path = ROOT) -> int:
    """The minimum of the CPU affinity and the container's CPU quota, and at least 1.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    # Rounded up: one thread too many is sometimes throttled, one too few leaves part of the quota unused.
    quotas = (math.ceil(quota) for quota in _quotas(root))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def share(cores: Sequence[int], workers: int, worker: int) -> Sequence[int]:
    """The cores of one worker: adjacent ones, divided evenly; one core if there are more workers than cores.

    Args:
        cores: The cores of all workers.
        workers: Number of workers.
        worker: Number of this worker, from 0.
    """
    first = worker * len(cores) // workers
    return cores[first : max((worker + 1) * len(cores) // workers, first + 1)]


def _quotas(root: Path) -> Iterator[float]:
    """Every quota that applies to this process: that of its control group and those of the parent groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _along([mounts, mounts / "unified"], path, _quota_v2)
        elif "cpu" in controllers.split(","):
            # Mounted under the names of the controllers in any order; "cpu" is then a link to the mount.
            yield from _along([mounts / controllers, mounts / "cpu"], path, _quota_v1)


def _along(mounts: list[Path], path: str, read: Reader) -> Iterator[float]:
    """The quotas of a group and its parents, up to the root of the mount."""
    group = PurePosixPath(path.lstrip("/"))
    # In a container the path may be that of the host, or outside the mount, while the mount starts at the
    # group of the container. Missing folders are therefore skipped, and the root is always read.
    groups = [PurePosixPath(), *(each for each in (group, *group.parents) if ".." not in each.parts)]
    for folder in (mount / each for mount in mounts for each in groups):
        try:
            quota = read(folder)
        except OSError:
            continue
        if quota is not None:
            yield quota


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
