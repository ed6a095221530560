"""What this process may use of its machine: cores, memory and a folder for temporary files."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, gettempdir

from attention_serving.server.errors import ServerError

ROOT = Path("/")
# Addresses of sockets have 107 bytes, of which names in the folder take 27; gRPC reads some characters
# differently, and the client library of Prometheus others.
SOCKET_FOLDER = re.compile(r"[\w./-]{1,80}", re.ASCII)
SHORT_FOLDER = "/tmp"  # noqa: S108 - mkdtemp creates a folder of this user alone


def temporary_folder() -> TemporaryDirectory[str]:
    """A folder for sockets that only this user can read, which is removed at the end.

    It is in TMPDIR, or in /tmp if a socket there could not be reached.

    Raises:
        ServerError: It cannot be created.
    """
    try:
        parent = gettempdir() if SOCKET_FOLDER.fullmatch(gettempdir()) else SHORT_FOLDER
        return TemporaryDirectory(prefix="attention-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        message = (
            f"cannot create a folder for sockets: {error}; set TMPDIR to a folder with free space, of up to"
        )
        raise ServerError(f"{message} 80 letters, digits, '_', '.', '-' and '/'") from error


def available_cores(root: Path = ROOT) -> int:
    """The minimum of the CPU affinity and the container's CPU quota, and at least 1.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    cores = min([len(os.sched_getaffinity(0)), *map(_quota, _groups(root, "cpu"))])
    # Rounded up: one thread too many is sometimes throttled, one too few leaves part of the quota unused.
    return max(1, math.ceil(cores))


def share_of_cores(cores: Sequence[int], workers: int, worker: int) -> Sequence[int]:
    """The cores of one worker: adjacent ones, divided evenly; one core if there are more workers than cores.

    Args:
        cores: The cores of all workers.
        workers: Number of workers.
        worker: Number of this worker, from 0.
    """
    first = worker * len(cores) // workers
    return cores[first : max((worker + 1) * len(cores) // workers, first + 1)]


def available_bytes(root: Path = ROOT) -> int:
    """The minimum of the machine's memory and of the container's limits, in bytes.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    return int(min([_machine_bytes(root, "MemTotal"), *map(_limit, _groups(root, "memory"))]))


def free_bytes(root: Path = ROOT) -> int:
    """How much more memory may be used now: what the machine has left, and the container's limits leave.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    return max(0, int(min([_machine_bytes(root, "MemAvailable"), *map(_left, _groups(root, "memory"))])))


def _machine_bytes(root: Path, name: str) -> int:
    words = (root / "proc/meminfo").read_text().split()
    return int(words[words.index(f"{name}:") + 1]) * 1024


def _quota(group: Path) -> float:
    """The cores that a group may use."""
    words = _words(group, "cpu.max") or _words(group, "cpu.cfs_quota_us") + _words(group, "cpu.cfs_period_us")
    if len(words) < 2 or words[0] in ("max", "-1"):  # noqa: PLR2004 - quota and period
        return math.inf
    return int(words[0]) / int(words[1])


def _limit(group: Path) -> float:
    """The bytes that a group may use. One of version 1 without a limit reports a number near 2^63."""
    (limit,) = _words(group, "memory.max") or _words(group, "memory.limit_in_bytes") or ("max",)
    return math.inf if limit == "max" else int(limit)


def _left(group: Path) -> float:
    """The bytes that a group may still use. Those in use include pages that the system can give up."""
    used = _words(group, "memory.current") or _words(group, "memory.usage_in_bytes") or ["0"]
    stat = _words(group, "memory.stat")
    sizes = dict(zip(stat[::2], stat[1::2], strict=True))
    reclaimable = sizes.get("total_inactive_file") or sizes.get("inactive_file", "0")
    return _limit(group) - int(used[0]) + int(reclaimable)


def _words(group: Path, name: str) -> list[str]:
    return _text(group / name).split()


def _text(file: Path) -> str:
    """What a file says; nothing if a group does not have it."""
    with suppress(OSError):
        return file.read_text()
    return ""


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and its parents, for a controller such as cpu.

    In a container the path may be that of the host, or outside the mount, while the mount starts at the group
    of the container. Folders may therefore be missing, and the root is always among them.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # Mounted under the names of the controllers in any order; the name of one is then a link.
        names = (".", "unified") if not controllers else (controllers, controller)
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                if ".." not in folder.parts:
                    yield from (mounts / name / folder for name in names)
