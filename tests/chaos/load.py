"""The load of the chaos cases: closed loop for capacity, open loop with deadlines for overload.

Each function runs in a process of its own (`benchmarks.processes.worker`) on the benchmark's channel, so that
capacity and overload are measured with the same generator, number of connections and messages.
"""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from benchmarks.channel import EncodedRequest, UnaryCaller, clock
from benchmarks.load import HEAD_START
from benchmarks.wire import METHODS, Api
from tests.chaos.http2 import CODES

# A server may limit the calls of one connection; more would wait in the generator, unseen by the server.
CONNECTIONS, IN_FLIGHT = 8, 4
OK, REFUSED, EXPIRED = "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"


@dataclass(frozen=True)
class Job:
    """What is sent, and where to."""

    target: str
    messages: tuple[bytes, ...]

    def caller(self, deadline_seconds: float = 60.0) -> UnaryCaller:
        """A caller on a new connection, which is established."""
        requests = [EncodedRequest(data, 1, 0) for data in self.messages]
        method = METHODS[Api.ATTENTION]
        caller = UnaryCaller(self.target, method, requests, deadline_seconds=deadline_seconds)
        caller.start()
        caller.finish()
        return caller


@dataclass(frozen=True, eq=False)
class Outcomes:
    """How each call of a schedule ended.

    Attributes:
        due: When each call was due, in seconds after the start of the schedule.
        seconds: From then until its end.
        codes: Its status code.
    """

    due: NDArray[np.float64]
    seconds: NDArray[np.float64]
    codes: NDArray[np.str_]

    def counts(self) -> dict[str, int]:
        """Calls by status code."""
        return dict(Counter(self.codes.tolist()))

    def latency(self, code: str, percent: float) -> float:
        """A percentile of the latency of one outcome, in seconds; 0 if no call ended so."""
        found = self.seconds[self.codes == code]
        return float(np.percentile(found, percent)) if len(found) else 0.0

    def answered(self, since: float, until: float, deadline: float) -> int:
        """Calls that were answered between two moments, each within its deadline."""
        ended = self.due + self.seconds
        good = (self.codes == OK) & (self.seconds <= deadline)
        return int(np.sum(good & (ended >= since) & (ended < until)))


def capacity(job: Job, seconds: float) -> float:
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

    callers = [job.caller() for _ in range(CONNECTIONS)]
    for caller in callers * IN_FLIGHT:
        caller.start()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(answers, callers, [seconds / 4] * CONNECTIONS))
        started = clock()
        rate = 1e9 * sum(pool.map(answers, callers, [seconds] * CONNECTIONS)) / (clock() - started)
    for caller in callers * IN_FLIGHT:
        caller.finish()
    for caller in callers:
        caller.close()
    return rate


def open_loop(
    job: Job, due: NDArray[np.int64], deadline_seconds: float, connections: int = CONNECTIONS
) -> Outcomes:
    """Sends a call at each moment of a schedule, and waits for the end of all.

    Args:
        job: What is sent.
        due: Nanoseconds after the start at which each call is sent.
        deadline_seconds: From then until its deadline.
        connections: How many connections the calls are sent on in turn.
    """
    callers = [job.caller(deadline_seconds) for _ in range(connections)]
    shares = [len(due[at::connections]) for at in range(connections)]
    origin = clock() + HEAD_START

    def send() -> None:
        for caller, moment in zip(cycle(callers), (due + origin).tolist(), strict=False):
            if (wait := moment - clock()) > 0:
                time.sleep(wait / 1e9)
            caller.start(moment)

    with ThreadPoolExecutor(connections + 1) as pool:
        sending = pool.submit(send)
        found = pool.map(lambda caller, count: [caller.finish() for _ in range(count)], callers, shares)
        ends = [end for own in found for end in own]
        sending.result()
    for caller in callers:
        caller.close()
    started = np.array([end.started for end in ends], np.int64)
    return Outcomes(
        due=(started - origin) / 1e9,
        seconds=(np.array([end.ended for end in ends], np.int64) - started) / 1e9,
        codes=np.array([CODES[end.status.code()] for end in ends]),
    )
