"""Processes of a benchmark: workers, the processor time of servers, and the machine."""

import multiprocessing
import os
import platform
import re
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

LIBRARIES = ("grpcio", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "protobuf", "torch")
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PARENT, USER_TICKS, SYSTEM_TICKS = 1, 11, 12  # fields of /proc/PID/stat after the name


def worker() -> ProcessPoolExecutor:
    """Returns an executor with one new process, which keeps what it has loaded between its jobs."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def process_tree(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[PARENT]), []).append(int(folder.name))
    tree = [pid]
    for parent in tree:  # also those that this appends
        tree += children.get(parent, [])
    return tree


def processor_seconds(pids: list[int]) -> float:
    """Returns user and system time of all threads of some processes. Processes that ended count as zero."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]) for fields in stats) / TICKS


def _stat(pid: int) -> list[str]:
    try:
        # The process name is in parentheses and may itself hold any character.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process ended
        return []


def now() -> str:
    """Returns the date and time for a report."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    """Returns the date, the machine, and the versions of Python and of those libraries that are installed."""
    processor = re.search(r"^model name\s*: (.*)$", (PROC / "cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    libraries = {package.name: package.version for package in distributions() if package.name in LIBRARIES}
    return {
        "date": now(),
        "processor": processor[1] if processor else "unknown",
        "cores": f"{cores()} of {os.cpu_count()}",
        "memory": f"{memory:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **dict(sorted(libraries.items())),
    }
