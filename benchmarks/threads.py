"""What each thread of the server does under load: its share of a core, and how often it is switched."""

import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import load
from benchmarks.compare import WARM_SECONDS, ComparisonCell
from benchmarks.load import MeasurementWindow
from benchmarks.processes import (
    PROC,
    SYSTEM_TICKS,
    TICKS,
    USER_TICKS,
    ServerAddress,
    processor_seconds,
    processor_ticks,
)

# Index in `processor_ticks`.
IDLE = 3
SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


class Reading(NamedTuple):
    """What one thread has used since it began.

    Attributes:
        name: Its name; several threads may share one.
        user: Processor time in its own code, in seconds.
        system: Processor time in the kernel, in seconds.
        switches: How often it was switched off a core.
    """

    name: str
    user: float
    system: float
    switches: int


class ThreadUse(NamedTuple):
    """What the threads of one name did during a measurement.

    Attributes:
        name: Their name.
        user: Cores that they used in their own code.
        system: Cores that they used in the kernel.
        switches: How often they were switched, for each request.
    """

    name: str
    user: float
    system: float
    switches: float


@dataclass(frozen=True)
class Trace:
    """One cell.

    Attributes:
        cell: Its name.
        rate: Sequences per second.
        microseconds: Processor time of the server for each sequence.
        idle: Cores that nothing used.
        threads: What the threads did, the busiest first.
    """

    cell: str
    rate: float
    microseconds: float
    idle: float
    threads: tuple[ThreadUse, ...]


def trace(
    cell: ComparisonCell, seconds: float, generator: ProcessPoolExecutor, server: ServerAddress
) -> Trace:
    """Measures a cell, warm-up included.

    Args:
        cell: The load.
        seconds: Duration.
        generator: The process of the load generator.
        server: The server.

    Raises:
        CallFailedError: The server did not answer.
    """
    window = MeasurementWindow(seconds, WARM_SECONDS)
    generator.submit(load.first_response, cell.endpoint(server)).result()
    before, idle, started = read(server.pid), idle_seconds(), time.monotonic()
    busy = processor_seconds([server.pid])
    result = generator.submit(load.closed_loop, cell.endpoint(server), cell.in_flight, window).result()
    elapsed, after = time.monotonic() - started, read(server.pid)
    rate = result.sequences / result.seconds
    return Trace(
        cell=cell.name,
        rate=rate,
        microseconds=1e6 * (processor_seconds([server.pid]) - busy) / (rate * elapsed),
        idle=(idle_seconds() - idle) / elapsed,
        threads=tuple(used(before, after, elapsed, rate * elapsed)),
    )


def read(pid: int) -> dict[str, Reading]:
    """Reads every thread of a process, by its identifier. Threads that end meanwhile are left out."""
    found = {}
    for task in (PROC / str(pid) / "task").iterdir():
        try:
            found[task.name] = _reading(task)
        except OSError:
            continue
    return found


def _reading(task: Path) -> Reading:
    name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
    ticks = fields.split()
    switches = sum(map(int, SWITCHES.findall((task / "status").read_text())))
    return Reading(name, int(ticks[USER_TICKS]) / TICKS, int(ticks[SYSTEM_TICKS]) / TICKS, switches)


def idle_seconds() -> float:
    """Time for which the cores of this machine were idle, in seconds, all of them together."""
    return processor_ticks()[IDLE] / TICKS


def used(
    before: dict[str, Reading], after: dict[str, Reading], seconds: float, requests: float
) -> list[ThreadUse]:
    """What threads did between two readings, by name, the busiest first.

    Args:
        before: The first reading.
        after: The second one. Threads that are new have used everything since.
        seconds: Time between them.
        requests: Number of requests that were answered meanwhile.
    """
    found: dict[str, ThreadUse] = {}
    for thread, now in after.items():
        then = before.get(thread, Reading(now.name, 0, 0, 0))
        others = found.get(now.name, ThreadUse(now.name, 0, 0, 0))
        found[now.name] = ThreadUse(
            now.name,
            others.user + (now.user - then.user) / seconds,
            others.system + (now.system - then.system) / seconds,
            others.switches + (now.switches - then.switches) / requests,
        )
    return sorted(found.values(), key=lambda use: use.user + use.system, reverse=True)
