"""Reads the limits that control groups set on this process: CPU quotas and memory."""

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

# Reads a limit of a control group from its folder; None if the group sets no limit.
Reader = Callable[[Path], float | None]


def limits(root: Path, controller: str, *, v1: Reader, v2: Reader) -> Iterator[float]:
    """Every limit of one kind that applies: that of the control group, and those of its parents.

    Args:
        root: Root of the file system that contains /proc and /sys.
        controller: Name of the controller in version 1, such as "cpu".
        v1: Reads the limit from a group of version 1; raises OSError if the folder does not have it.
        v2: Reads the limit from a group of version 2; likewise.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _along([mounts, mounts / "unified"], path, v2)
        elif controller in controllers.split(","):
            # Mounted under the names of the controllers in any order; the name of one is then a link.
            yield from _along([mounts / controllers, mounts / controller], path, v1)


def _along(mounts: list[Path], path: str, read: Reader) -> Iterator[float]:
    """The limits of a group and its parents, up to the root of the mount."""
    group = PurePosixPath(path.lstrip("/"))
    # In a container the path may be that of the host, or outside the mount, while the mount starts at the
    # group of the container. Missing folders are therefore skipped, and the root is always read.
    groups = [PurePosixPath(), *(each for each in (group, *group.parents) if ".." not in each.parts)]
    for folder in (mount / each for mount in mounts for each in groups):
        try:
            limit = read(folder)
        except OSError:
            continue
        if limit is not None:
            yield limit
