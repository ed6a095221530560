"""Load above the capacity, with deadlines: what is answered in time, what is refused, and how fast.

Capacity is measured before and after: closed loop, with the same generator process and the same messages. At
three times the capacity the generator sends three times the bytes, which costs processor time of the same
machine; the table states its share of one core in both.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import poisson
from benchmarks.wire import METHODS, Api
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures, mib
from tests.chaos.load import EXPIRED, OK, REFUSED, Job, Outcomes, capacity, open_loop
from tests.chaos.process import increased, metrics, readings, reset_peak, server_of, supported
from tests.chaos.requests import attend_request, random_rows
from tests.chaos.scale import Scale

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MODEL, ROWS, WIDTH = "multi-head-768x12", 128, 768
IN_FLIGHT = 32
RECOVERY_SECONDS = 3.0
MAX_IN_FLIGHT_BYTES, MAX_MEMORY_BYTES = 512 << 20, 1 << 30
# Messages that the core has received and not delivered.
SLACK_BYTES = 256 << 20


def schedule(rate: float, seconds: float, after: float) -> np.ndarray:
    """Arrivals at a rate, and then, for the recovery, evenly at another rate."""
    overload = poisson(rate, seconds, seed=1)
    recovery = seconds * 1e9 + np.arange(int(after * RECOVERY_SECONDS)) / after * 1e9
    return np.concatenate([overload, recovery.astype(np.int64)])


@pytest.mark.parametrize("deadline", [1.0, 10.0], ids=["deadline-1s", "deadline-10s"])
@pytest.mark.parametrize("factor", [1.2, 3.0], ids=["1.2x", "3x"])
def test_goodput(
    wide: Path, tmp_path: Path, generator: ProcessPoolExecutor, scale: Scale, factor: float, deadline: float
) -> None:
    messages = tuple(attend_request(MODEL, random_rows(ROWS, WIDTH, seed)) for seed in range(4))
    options = [f"--max-in-flight-bytes={MAX_IN_FLIGHT_BYTES}", *supported(max_memory=MAX_MEMORY_BYTES)]
    with (
        Figures(f"overload: {factor} x capacity, deadlines of {deadline:g} s") as figures,
        server_of(wide, tmp_path, *options) as server,
    ):
        job = Job(server.target, METHODS[Api.ATTENTION], messages)
        rate, share = generator.submit(capacity, job, IN_FLIGHT, scale.capacity_seconds).result()
        idle, counters = reset_peak(server.process.pid), metrics(server)
        due = schedule(factor * rate, scale.overload_seconds, rate)
        outcomes = generator.submit(open_loop, job, due, deadline).result()
        # The mean of both is the capacity that the machine had in between.
        later, _ = generator.submit(capacity, job, IN_FLIGHT, scale.capacity_seconds).result()
        figures.note("capacity before and after, answers/s", f"{rate:.0f} and {later:.0f}")
        figures.note("generator at capacity, cores", share)
        capacities = (rate + later) / 2, min(rate, (rate + later) / 2)
        report(figures, outcomes, capacities, scale.overload_seconds, deadline)
        memory(figures, server, idle)
        for name, count in increased(counters, metrics(server), "attention_refused").items():
            figures.note(name, count)


def report(
    figures: Figures, outcomes: Outcomes, capacities: tuple[float, float], seconds: float, deadline: float
) -> None:
    """Adds what happened to the calls.

    Args:
        figures: The table.
        outcomes: The calls.
        capacities: The capacity; and the rate that was offered after the overload, or the capacity if it
            is less.
        seconds: Duration of the overload.
        deadline: Deadline of each call.
    """
    rate, offered = capacities
    loaded = outcomes.due < seconds
    # The queue fills in the first second or deadline; what is measured is the state after it.
    since = min(deadline, seconds / 2)
    goodput = outcomes.answered(since, seconds, deadline) / (seconds - since) / rate
    figures.note("calls offered", int(loaded.sum()))
    figures.note("calls by status, with recovery", outcomes.counts())
    figures.note("refused by reason", outcomes.refusals())
    figures.note("generator under overload, cores", outcomes.generator_seconds / (seconds + RECOVERY_SECONDS))
    figures.at_least("goodput, share of capacity", goodput, 0.9)
    figures.note("expired", outcomes.counts().get(EXPIRED, 0))
    figures.note("answers p50, s", outcomes.latency(OK, 50))
    figures.note("answers p99, s", outcomes.latency(OK, 99))
    figures.note("refusals p50, s", outcomes.latency(REFUSED, 50))
    figures.at_most("refusals p99, s", outcomes.latency(REFUSED, 99), 0.05)
    refused = outcomes.codes == REFUSED
    figures.equal("refusals without RetryInfo", int((refused & ~outcomes.retry_after).sum()), 0)
    figures.among("statuses", outcomes.counts(), {OK, REFUSED, EXPIRED})
    first = outcomes.answered(seconds, seconds + 1, deadline) / offered
    later = (
        outcomes.answered(seconds + 1, seconds + RECOVERY_SECONDS, deadline) / (RECOVERY_SECONDS - 1) / rate
    )
    figures.note("rate in the first second after, share of offered", first)
    figures.at_least("rate in the two seconds after that, share of offered", later, 0.9)


def memory(figures: Figures, server: ServerProcess, idle: int) -> None:
    """Adds the peak of resident memory."""
    bound = idle + MAX_MEMORY_BYTES + SLACK_BYTES
    figures.note("resident before, MiB", mib(idle))
    figures.at_most("resident peak, MiB", mib(readings(server.process.pid).peak), mib(bound))
