"""The soak: mixed lengths for minutes, and the server's resident memory meanwhile."""

import time
from concurrent.futures import Future, ProcessPoolExecutor
from statistics import median

from benchmarks.load import Endpoint, soak
from benchmarks.machine import now
from benchmarks.processes import ServerAddress
from benchmarks.processor import family, resident_bytes
from benchmarks.results import Memory, MemorySample
from benchmarks.summary import Spread, spread
from benchmarks.wire import Api
from benchmarks.workload import Lengths, Model

LENGTHS = Lengths(2048, mixed=True)
IN_FLIGHT = 8
SAMPLE_SECONDS = 1.0
FIRST, MARGIN = 60.0, 10.0
"""The first value is that of the samples so close to one minute; the last that of as many at the end."""


def measure(
    generator: ProcessPoolExecutor, service: ServerAddress, models: tuple[Model, ...], seconds: float
) -> Memory:
    """Keeps the service busy with the models in turn, and samples its memory."""
    endpoints = tuple(
        Endpoint(service.address, service.pid, Api.OPEN_INFERENCE, model, LENGTHS) for model in models
    )
    answered: Future[int] = generator.submit(soak, endpoints, IN_FLIGHT, seconds)
    date, started, samples = now(), time.monotonic(), []
    while not answered.done():
        elapsed = time.monotonic() - started
        samples.append(MemorySample(elapsed, resident_bytes(family(service.pid))))
        time.sleep(SAMPLE_SECONDS)
    names = " and ".join(model.name for model in models)
    load = f"lengths {LENGTHS.name} (lognormal), {names} in turn, {IN_FLIGHT} in flight, closed loop"
    return Memory(date, load, time.monotonic() - started, answered.result(), tuple(samples))


def at_minute(memory: Memory) -> float | None:
    """Bytes after one minute; None where the soak was shorter."""
    return _typical(memory, FIRST - MARGIN / 2, FIRST + MARGIN / 2)


def at_end(memory: Memory) -> float | None:
    """Bytes at the end of the load."""
    last = memory.samples[-1].seconds if memory.samples else 0.0
    return _typical(memory, last - MARGIN, last)


def growth_ratio(memory: Memory) -> Spread | None:
    """The last value by the first; None for a soak that does not reach well beyond a minute."""
    first, last = at_minute(memory), at_end(memory)
    if first is None or last is None or memory.seconds < FIRST + 2 * MARGIN:
        return None
    return spread([last / first])


def _typical(memory: Memory, since: float, until: float) -> float | None:
    found = [one.resident_bytes for one in memory.samples if since <= one.seconds <= until]
    return median(found) if found else None
