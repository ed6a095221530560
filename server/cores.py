"""How many cores this process may use, and how they are shared out among workers."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path("/")
# Of a control group's folder: its quota in cores, or None where it has none.
Reader = Callable[[Path], float | None]


def available(root: Path = ROOT) -> int:
    """The least of CPU affinity and the container's CPU quota, and at least 1.

    Args:
        root: The file system whose /proc and /sys are read.
    """
    # Rounded up: a thread too many is throttled now and then, a thread too few leaves granted time unused.
    quotas = (math.ceil(quota) for quota in _quotas(root))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def share(cores: Sequence[int], workers: int, worker: int) -> Sequence[int]:
    """A worker's part of the cores: neighbours, split as evenly as can be; one core where there are too few.

    Args:
        cores: What is shared out.
        workers: Among how many.
        worker: Which of them, from 0.
    """
    first = worker * len(cores) // workers
    return cores[first : max((worker + 1) * len(cores) // workers, first + 1)]


def _quotas(root: Path) -> Iterator[float]:
    """Every quota that binds this process: its own group's, and those of the groups around it."""
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
            # Mounted under the controllers' names, in this order or another; then "cpu" is a link to it.
            yield from _along([mounts / controllers, mounts / "cpu"], path, _quota_v1)


def _along(mounts: list[Path], path: str, read: Reader) -> Iterator[float]:
    """The quotas from a group up to the root of its mount."""
    group = PurePosixPath(path.lstrip("/"))
    # A container may be told the path that its host sees, or one outside its mount, while the mount begins
    # at its own group: so folders that are not there are passed over, and the root is always read.
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
