"""Load above the capacity, with deadlines: what is answered in time, what is refused, and how fast.

Capacity is measured before and after: closed loop, with the same generator process and the same messages.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import poisson
from tests.chaos.figures import Figures, scaled
from tests.chaos.load import EXPIRED, OK, REFUSED, Job, Outcomes, capacity, open_loop
from tests.chaos.process import (
    MIB,
    MODEL,
    attend_message,
    random_rows,
    readings,
    reset_peak,
    server_of,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MESSAGES = tuple(attend_message(MODEL, random_rows(128, seed=seed)).SerializeToString() for seed in range(4))
CAPACITY_SECONDS, OVERLOAD_SECONDS, RECOVERY_SECONDS = scaled(4, 10), scaled(10, 60), 3.0
MAX_MEMORY_MIB = 1024
# Messages that the core has received and not delivered.
SLACK_MIB = 256


@pytest.mark.parametrize("deadline", [1.0, 10.0], ids=["deadline-1s", "deadline-10s"])
@pytest.mark.parametrize("factor", [1.2, 3.0], ids=["1.2x", "3x"])
def test_goodput(
    wide: Path, tmp_path: Path, generator: ProcessPoolExecutor, factor: float, deadline: float
) -> None:
    options = ("--max-in-flight-bytes=512MiB", f"--max-memory={MAX_MEMORY_MIB}MiB")
    seconds = OVERLOAD_SECONDS
    with (
        Figures(f"overload: {factor} x capacity, deadlines of {deadline:g} s") as figures,
        server_of(wide, tmp_path, *options) as server,
    ):
        job = Job(server.target, MESSAGES)
        rate = generator.submit(capacity, job, CAPACITY_SECONDS).result()
        idle = reset_peak(server.process.pid)
        # After the overload, calls arrive evenly at the capacity.
        recovery = seconds * 1e9 + np.arange(int(rate * RECOVERY_SECONDS)) / rate * 1e9
        due = np.concatenate([poisson(factor * rate, seconds, seed=1), recovery.astype(np.int64)])
        outcomes = generator.submit(open_loop, job, due, deadline).result()
        # The mean of both is the capacity that the machine had in between.
        later = generator.submit(capacity, job, CAPACITY_SECONDS).result()
        figures.note("capacity before and after, answers/s", f"{rate:.0f} and {later:.0f}")
        report(figures, outcomes, (rate + later) / 2, deadline)
        figures.note("resident before, MiB", idle / MIB)
        peak = readings(server.process.pid).peak
        figures.at_most("resident peak, MiB", peak / MIB, idle / MIB + MAX_MEMORY_MIB + SLACK_MIB)


def report(figures: Figures, outcomes: Outcomes, rate: float, deadline: float) -> None:
    """Adds what happened to the calls, beside the capacity."""
    seconds = OVERLOAD_SECONDS
    # The queue fills in the first second or deadline; what is measured is the state after it.
    since = min(deadline, seconds / 2)
    goodput = outcomes.answered(since, seconds, deadline) / (seconds - since) / rate
    figures.among("calls by status, with recovery", outcomes.counts(), {OK, REFUSED, EXPIRED})
    figures.at_least("goodput, share of capacity", goodput, 0.9)
    for percent in (50, 99):
        figures.note(f"answers p{percent}, s", outcomes.latency(OK, percent))
    figures.at_most("refusals p99, s", outcomes.latency(REFUSED, 99), 0.05)
    in_time = (outcomes.codes == OK) & (outcomes.seconds <= deadline)
    share = float(np.mean(in_time[outcomes.due >= seconds + 1]))
    figures.at_least("answered in time from a second after the overload, share", share, 0.9)
