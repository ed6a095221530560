"""How much memory this process may use."""

from pathlib import Path

from server import control_groups

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """The minimum of the machine's memory and of the container's limits, in bytes.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    limits = control_groups.limits(root, "memory", v1=_limit_v1, v2=_limit_v2)
    return int(min([_machine_bytes(root), *limits]))


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        if name == "MemTotal:":
            return int(value) * 1024
    raise OSError("/proc/meminfo does not state MemTotal")


def _limit_v2(folder: Path) -> int | None:
    limit = (folder / "memory.max").read_text().strip()
    return None if limit == "max" else int(limit)


def _limit_v1(folder: Path) -> int:
    # A group without a limit reports a number near 2^63, which is above the machine's memory.
    return int((folder / "memory.limit_in_bytes").read_text())
