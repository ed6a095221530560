"""What this process may use of its machine: cores, memory, and a folder for temporary files."""

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from attention_serving.server.errors import WorkerError

ROOT = Path("/")
PREFIX = "attention-metrics-"
# Reads a limit of a control group from its folder; None if the group sets no limit.
Reader = Callable[[Path], float | None]


def available_cores(root: Path = ROOT) -> int:
    """The minimum of the CPU affinity and the container's CPU quota, and at least 1.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    # Rounded up: one thread too many is sometimes throttled, one too few leaves part of the quota unused.
    quotas = map(math.ceil, _limits(root, "cpu", v1=_quota_v1, v2=_quota_v2))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def share_of_cores(cores: Sequence[int], workers: int, worker: int) -> Sequence[int]:
    """The cores of one worker: adjacent ones, divided evenly; one core if there are more workers than cores.

    Args:
        cores: The cores of all workers.
        workers: Number of workers.
        worker: Number of this worker, from 0.
    """
    first = worker * len(cores) // workers
    return cores[first : max((worker + 1) * len(cores) // workers, first + 1)]


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())


def available_bytes(root: Path = ROOT) -> int:
    """The minimum of the machine's memory and of the container's limits, in bytes.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    limits = _limits(root, "memory", v1=_limit_v1, v2=_limit_v2)
    return int(min([_machine_bytes(root), *limits]))


def free_bytes(root: Path = ROOT) -> int:
    """How much more memory may be used now: what the machine has left, and the container's limits leave.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    left = _limits(root, "memory", v1=_left_v1, v2=_left_v2)
    return max(0, int(min([_machine_bytes(root, "MemAvailable:"), *left])))


def _machine_bytes(root: Path, line_name: str = "MemTotal:") -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        if name == line_name:
            return int(value) * 1024
    raise OSError(f"/proc/meminfo does not state {line_name}")


def _left_v2(folder: Path) -> int | None:
    limit = _limit_v2(folder)
    used = int((folder / "memory.current").read_text())
    return None if limit is None else limit - used + _reclaimable(folder, "inactive_file")


def _left_v1(folder: Path) -> int:
    used = int((folder / "memory.usage_in_bytes").read_text())
    return _limit_v1(folder) - used + _reclaimable(folder, "total_inactive_file")


def _reclaimable(folder: Path, name: str) -> int:
    """Pages of files that the system gives up when memory is needed."""
    lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((int(value) for own, value in lines if own == name), 0)


def _limit_v2(folder: Path) -> int | None:
    limit = (folder / "memory.max").read_text().strip()
    return None if limit == "max" else int(limit)


def _limit_v1(folder: Path) -> int:
    # A group without a limit reports a number near 2^63, which is above the machine's memory.
    return int((folder / "memory.limit_in_bytes").read_text())


def _limits(root: Path, controller: str, *, v1: Reader, v2: Reader) -> Iterator[float]:
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder that only this user can read, and removes it and abandoned ones of the same kind.

    A process that is killed cannot remove its folder. Its workers do so when they find the pipe closed. If
    those were killed too, the next service of the same user that starts removes the folder: a lock that the
    system releases with the process shows which folders are in use.

    Raises:
        WorkerError: The system's folder for temporary files cannot be written to.
    """
    try:
        _remove_abandoned()
        folder, descriptor = _make_locked()
    except OSError as error:
        raise WorkerError(f"a temporary folder is needed: {error.strerror}") from error
    try:
        yield folder
    finally:
        remove_folder(folder)
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes a folder. Processes that still write to its files are not disturbed."""
    shutil.rmtree(folder, ignore_errors=True)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)  # another service that started at this moment took it for abandoned


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or has just been removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(folder)
            finally:
                os.close(descriptor)
