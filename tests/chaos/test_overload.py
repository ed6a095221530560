"""Load above the capacity, with deadlines: what is answered in time, what is refused, and how fast.

Capacity is measured before and after: closed loop, with the same generator process and the same messages. The
generator runs on the benchmark's channel in a process of its own (`benchmarks.processes.worker`).
"""

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.channel import EncodedRequest, UnaryCaller, clock
from benchmarks.load import HEAD_START, poisson
from benchmarks.wire import METHODS, Api
from tests.chaos.figures import Figures, scaled
from tests.chaos.http2 import CODES
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
OK, REFUSED, EXPIRED = "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
# A server may limit the calls of one connection; more would wait in the generator, unseen by the server.
CONNECTIONS, IN_FLIGHT = 8, 4
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
        rate = generator.submit(capacity, server.target).result()
        idle = reset_peak(server.process.pid)
        # After the overload, calls arrive evenly at the capacity.
        recovery = seconds * 1e9 + np.arange(int(rate * RECOVERY_SECONDS)) / rate * 1e9
        due = np.concatenate([poisson(factor * rate, seconds, seed=1), recovery.astype(np.int64)])
        outcomes = generator.submit(open_loop, server.target, due, deadline).result()
        # The mean of both is the capacity that the machine had in between.
        later = generator.submit(capacity, server.target).result()
        figures.note("capacity before and after, answers/s", f"{rate:.0f} and {later:.0f}")
        report(figures, outcomes, (rate + later) / 2, deadline)
        figures.note("resident before, MiB", idle / MIB)
        peak = readings(server.process.pid).peak
        figures.at_most("resident peak, MiB", peak / MIB, idle / MIB + MAX_MEMORY_MIB + SLACK_MIB)


class Outcomes(NamedTuple):
    """How each call of a schedule ended.

    Attributes:
        due: When each call was due, in seconds after the start of the schedule.
        seconds: From then until its end.
        codes: Its status code.
    """

    due: NDArray[np.float64]
    seconds: NDArray[np.float64]
    codes: NDArray[np.str_]


def connect(target: str, stack: ExitStack, deadline_seconds: float = 60.0) -> list[UnaryCaller]:
    """A caller on each of some new connections, which are established."""
    requests = [EncodedRequest(data, 1, 0) for data in MESSAGES]
    callers = []
    for _ in range(CONNECTIONS):
        caller = UnaryCaller(target, METHODS[Api.ATTENTION], requests, deadline_seconds=deadline_seconds)
        callers.append(stack.enter_context(closing(caller)))
        caller.start()
        caller.finish()
    return callers


def capacity(target: str) -> float:
    """Answers per second in a closed loop of 32 calls, after a quarter of the time as warm-up.

    Raises:
        RuntimeError: A call failed.
    """

    def answers(caller: UnaryCaller, seconds: float) -> int:
        count, until = 0, clock() + int(seconds * 1e9)
        while clock() < until:
            if not caller.finish().succeeded:
                raise RuntimeError("a call of the closed loop failed")
            count += 1
            caller.start()
        return count

    with ExitStack() as stack, ThreadPoolExecutor(CONNECTIONS) as pool:
        callers = connect(target, stack)
        for caller in callers * IN_FLIGHT:
            caller.start()
        list(pool.map(answers, callers, [CAPACITY_SECONDS / 4] * CONNECTIONS))
        started = clock()
        rate = 1e9 * sum(pool.map(answers, callers, [CAPACITY_SECONDS] * CONNECTIONS)) / (clock() - started)
        for caller in callers * IN_FLIGHT:
            caller.finish()
    return rate


def open_loop(target: str, due: NDArray[np.int64], deadline_seconds: float) -> Outcomes:
    """Sends a call at each moment of a schedule, and waits for the end of all.

    Args:
        target: The server.
        due: Nanoseconds after the start at which each call is sent.
        deadline_seconds: From then until its deadline.
    """
    with ExitStack() as stack, ThreadPoolExecutor(CONNECTIONS + 1) as pool:
        callers = connect(target, stack, deadline_seconds)
        shares = [len(due[at::CONNECTIONS]) for at in range(CONNECTIONS)]
        origin = clock() + HEAD_START

        def send() -> None:
            for caller, moment in zip(cycle(callers), (due + origin).tolist(), strict=False):
                if (wait := moment - clock()) > 0:
                    time.sleep(wait / 1e9)
                caller.start(moment)

        sending = pool.submit(send)
        found = pool.map(lambda caller, count: [caller.finish() for _ in range(count)], callers, shares)
        ends = [end for own in found for end in own]
        sending.result()
    started = np.array([end.started for end in ends], np.int64)
    return Outcomes(
        due=(started - origin) / 1e9,
        seconds=(np.array([end.ended for end in ends], np.int64) - started) / 1e9,
        codes=np.array([CODES[end.status.code()] for end in ends]),
    )


def report(figures: Figures, outcomes: Outcomes, rate: float, deadline: float) -> None:
    """Adds what happened to the calls, beside the capacity."""
    due, seconds, codes = outcomes
    in_time, ended = (codes == OK) & (seconds <= deadline), due + seconds
    # The queue fills in the first second or deadline; what is measured is the state after it.
    since = min(deadline, OVERLOAD_SECONDS / 2)
    answered = np.sum(in_time & (ended >= since) & (ended < OVERLOAD_SECONDS))
    goodput = float(answered) / (OVERLOAD_SECONDS - since) / rate
    figures.among("calls by status, with recovery", dict(Counter(codes.tolist())), {OK, REFUSED, EXPIRED})
    figures.at_least("goodput, share of capacity", goodput, 0.9)
    for percent in (50, 99):
        figures.note(f"answers p{percent}, s", float(np.percentile(seconds[codes == OK], percent)))
    if REFUSED in codes:
        figures.at_most("refusals p99, s", float(np.percentile(seconds[codes == REFUSED], 99)), 0.05)
    share = float(np.mean(in_time[due >= OVERLOAD_SECONDS + 1]))
    figures.at_least("answered in time from a second after the overload, share", share, 0.9)
