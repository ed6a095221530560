"""Load above the capacity, with deadlines: what is answered in time, what is refused, and how fast.

Capacity is measured before and after: closed loop, with the same generator process and the same messages. The
generator runs on the benchmark's channel in a process of its own (`benchmarks.processes.worker`).

To refuse a call takes processor time too, in the server and in the generator. If the machine answers C calls
per second, or refuses R of them, and f C calls arrive, then a share x of C can be answered at most, with
x + (f - x) C / R = 1. R is measured on a server that refuses everything.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient
from numpy.typing import NDArray

from benchmarks.channel import UnaryCaller, clock
from benchmarks.load import (
    HEAD_START,
    Endpoint,
    MeasurementWindow,
    closed_loop,
    encoded_requests,
    poisson,
    send_when_due,
)
from benchmarks.wire import METHODS, Api
from benchmarks.workload import MIDDLE, Model
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import MIB, MODEL, WIDTH, readings, reset_peak, server_of
from tests.support.eager import Array

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
OK, REFUSED, EXPIRED = "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
SERVED = Model(768, 12, served_as=MODEL)
# A server may limit the calls of one connection; more would wait in the generator, unseen by the server.
CONNECTIONS, IN_FLIGHT = 8, 32
CAPACITY_SECONDS, OVERLOAD_SECONDS, RECOVERY_SECONDS = scaled(4, 10), scaled(10, 60), 3.0
CLOSED = MeasurementWindow(CAPACITY_SECONDS, warm_seconds=CAPACITY_SECONDS / 4)
MAX_MEMORY_MIB = 1024
# The share of what is possible beside refusals that must be answered.
GOODPUT = 0.95
# Messages that the core has received and not delivered.
SLACK_MIB = 256


@pytest.mark.parametrize("deadline", [1.0, 10.0], ids=["deadline-1s", "deadline-10s"])
@pytest.mark.parametrize("factor", [1.2, 3.0], ids=["1.2x", "3x"])
def test_goodput(
    wide: Path, tmp_path: Path, generator: ProcessPoolExecutor, factor: float, deadline: float
) -> None:
    with server_of(wide, tmp_path, "--max-concurrent-calls=1") as refusing:
        refusals = refused_per_second(refusing, generator)
    options = ("--max-in-flight-bytes=512MiB", f"--max-memory={MAX_MEMORY_MIB}MiB")
    seconds = OVERLOAD_SECONDS
    with (
        Figures(f"overload: {factor} x capacity, deadlines of {deadline:g} s") as figures,
        server_of(wide, tmp_path, *options) as server,
    ):
        endpoint = Endpoint(server.target, server.process.pid, Api.ATTENTION, SERVED, MIDDLE)

        def capacity() -> float:
            result = generator.submit(closed_loop, endpoint, IN_FLIGHT, CLOSED).result()
            assert not result.failures
            return result.sequences / result.seconds

        rate = capacity()
        idle = reset_peak(server.process.pid)
        # After the overload, calls arrive evenly at the capacity.
        recovery = seconds * 1e9 + np.arange(int(rate * RECOVERY_SECONDS)) / rate * 1e9
        due = np.concatenate([poisson(factor * rate, seconds, seed=1), recovery.astype(np.int64)])
        outcomes = generator.submit(overload, endpoint, due, deadline).result()
        # The mean of both is the capacity that the machine had in between.
        later = capacity()
        figures.note("capacity before and after, answers/s", f"{rate:.0f} and {later:.0f}")
        report(figures, outcomes, (rate + later) / 2, deadline, factor, refusals)
        figures.note("resident before, MiB", idle / MIB)
        peak = readings(server.process.pid).peak
        figures.at_most("resident peak, MiB", peak / MIB, idle / MIB + MAX_MEMORY_MIB + SLACK_MIB)


def overload(
    endpoint: Endpoint, due: NDArray[np.int64], deadline_seconds: float
) -> list[tuple[float, float, str]]:
    """Sends a call at each moment of a schedule, on several connections, and waits for the end of all.

    Args:
        endpoint: The server.
        due: Nanoseconds after the start at which each call is sent.
        deadline_seconds: From then until its deadline.

    Returns:
        For each call, the seconds from the start until it was due, and from then until its end; its status.
    """
    callers, requests = [], encoded_requests(endpoint)
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            caller = UnaryCaller(
                endpoint.address, METHODS[endpoint.api], requests, deadline_seconds=deadline_seconds
            )
            callers.append(stack.enter_context(closing(caller)))
            caller.start()
            caller.finish()  # establishes the connection
        origin = clock() + HEAD_START
        ends = send_when_due(callers, due + origin)
    return [
        ((end.started - origin) / 1e9, (end.ended - end.started) / 1e9, CODES[end.status.code()])
        for end in ends
    ]


def refused_per_second(server: ServerProcess, generator: ProcessPoolExecutor) -> float:
    """How many calls per second a server with one place refuses while another call holds that place."""
    endpoint = Endpoint(server.target, server.process.pid, Api.ATTENTION, SERVED, MIDDLE)
    is_measured = Event()

    def one_request() -> Iterator[Array]:
        yield np.zeros((1, WIDTH), np.float32)
        is_measured.wait()  # the stream holds its place until then

    with (
        AttentionClient(server.target) as client,
        closing(client.attend_stream(MODEL, one_request())) as stream,
    ):
        next(stream)
        result = generator.submit(closed_loop, endpoint, IN_FLIGHT, CLOSED).result()
        is_measured.set()
    assert not result.sequences
    return result.failures / result.seconds


def report(
    figures: Figures,
    outcomes: list[tuple[float, float, str]],
    rate: float,
    deadline: float,
    factor: float,
    refusals: float,
) -> None:
    """Adds what happened to the calls, beside the capacity."""
    due, seconds, codes = map(np.array, zip(*outcomes, strict=True))
    in_time, ended = (codes == OK) & (seconds <= deadline), due + seconds
    # The queue fills in the first second or deadline; what is measured is the state after it.
    since = min(deadline, OVERLOAD_SECONDS / 2)
    answered = np.sum(in_time & (ended >= since) & (ended < OVERLOAD_SECONDS))
    goodput = float(answered) / (OVERLOAD_SECONDS - since) / rate
    figures.among("calls by status, with recovery", dict(Counter(codes.tolist())), {OK, REFUSED, EXPIRED})
    cost = rate / refusals
    possible = min(1.0, (1 - factor * cost) / (1 - cost))
    figures.note("refusals/s of a server that refuses everything", refusals)
    figures.at_least("goodput, share of capacity", goodput, GOODPUT * possible)
    for percent in (50, 99):
        figures.note(f"answers p{percent}, s", float(np.percentile(seconds[codes == OK], percent)))
    if REFUSED in codes:
        figures.at_most("refusals p99, s", float(np.percentile(seconds[codes == REFUSED], 99)), 0.05)
    share = float(np.mean(in_time[due >= OVERLOAD_SECONDS + 1]))
    figures.at_least("answered in time from a second after the overload, share", share, 0.9)
