"""Where a run was made: the machine and the versions of everything that takes part."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

LIBRARIES = (
    "grpcio",
    "hdrhistogram",
    "numpy",
    "onnx",
    "onnxruntime",
    "protobuf",
    "torch",
)
PROC = Path("/proc")
STEAL = 8  # column of the line "cpu" in /proc/stat


def now() -> str:
    """The date of a report."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, str]:
    """Processor, cores, memory, kernel."""
    memory = int(_first("meminfo", "MemTotal").split()[0]) / (1 << 20)
    return {
        "processor": _first("cpuinfo", "model name"),
        "cores": f"{cores()} of {os.cpu_count()}",
        "memory": f"{memory:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Python and the libraries of the service and of this benchmark."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


def stolen_share(before: list[int], after: list[int]) -> float:
    """The share of time between two readings that the host gave to other machines."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return spent[STEAL - 1] / max(1, sum(spent[:STEAL]))


def processor_ticks() -> list[int]:
    """The kernel's counters of user, nice, system, idle, ... time of all cores."""
    return [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:]]


def _first(file: str, key: str) -> str:
    for line in (PROC / file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"
