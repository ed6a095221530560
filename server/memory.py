"""How much memory this process may use."""

from pathlib import Path

from attention_serving.server import control_groups

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """The minimum of the machine's memory and of the container's limits, in bytes.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    limits = control_groups.limits(root, "memory", v1=_limit_v1, v2=_limit_v2)
    return int(min([_machine_bytes(root), *limits]))


def free_bytes(root: Path = ROOT) -> int:
    """How much more memory may be used now: what the machine has left, and the container's limits leave.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    left = control_groups.limits(root, "memory", v1=_left_v1, v2=_left_v2)
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
