"""How many cores this process may use, and how they are divided among workers."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from attention_serving.server import control_groups

ROOT = Path("/")


def available(root: Path = ROOT) -> int:
    """The minimum of the CPU affinity and the container's CPU quota, and at least 1.

    Args:
        root: Root of the file system that contains /proc and /sys.
    """
    # Rounded up: one thread too many is sometimes throttled, one too few leaves part of the quota unused.
    quotas = map(math.ceil, control_groups.limits(root, "cpu", v1=_quota_v1, v2=_quota_v2))
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


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
