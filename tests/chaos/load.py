"""The load of the chaos cases: closed loop for capacity, open loop with deadlines for overload.

Each function runs in a process of its own (`benchmarks.processes.worker`) on the benchmark's channel, so that
capacity and overload are measured with the same generator, number of connections and messages.
"""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from numpy.typing import NDArray

from benchmarks.channel import Completion, EncodedRequest, UnaryCaller, clock
from benchmarks.load import HEAD_START

CODES = {code.value[0]: code.name for code in StatusCode}
DETAILS_KEY = "grpc-status-details-bin"
# A server may limit the calls of one connection; more would wait in the generator, unseen by the server.
CONNECTIONS = 8
OK, REFUSED, EXPIRED = "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"


@dataclass(frozen=True)
class Job:
    """What is sent, and where to."""

    target: str
    method: bytes
    messages: tuple[bytes, ...]
    token: str = ""

    def caller(self, deadline_seconds: float = 60.0) -> UnaryCaller:
        """A caller on a new connection, which is established."""
        requests = [EncodedRequest(data, 1, 0) for data in self.messages]
        metadata = (("authorization", f"Bearer {self.token}"),) if self.token else ()
        caller = UnaryCaller(
            self.target, self.method, requests, deadline_seconds=deadline_seconds, metadata=metadata
        )
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
        reasons: The reason in the status details, or else empty.
        retry_after: Whether the status details hold RetryInfo.
        generator_seconds: Processor time of the generator.
    """

    due: NDArray[np.float64]
    seconds: NDArray[np.float64]
    codes: NDArray[np.str_]
    reasons: NDArray[np.str_]
    retry_after: NDArray[np.bool_]
    generator_seconds: float

    def counts(self) -> dict[str, int]:
        """Calls by status code."""
        return dict(Counter(self.codes.tolist()))

    def refusals(self) -> dict[str, int]:
        """Refused calls by reason."""
        return dict(Counter(self.reasons[self.codes == REFUSED].tolist()))

    def latency(self, code: str, percent: float) -> float:
        """A percentile of the latency of one outcome, in seconds; 0 if no call ended so."""
        found = self.seconds[self.codes == code]
        return float(np.percentile(found, percent)) if len(found) else 0.0

    def answered(self, since: float, until: float, deadline: float) -> int:
        """Calls that were answered between two moments, each within its deadline."""
        ended = self.due + self.seconds
        good = (self.codes == OK) & (self.seconds <= deadline)
        return int(np.sum(good & (ended >= since) & (ended < until)))


def capacity(job: Job, in_flight: int, seconds: float) -> tuple[float, float]:
    """Measures the closed-loop rate.

    Args:
        job: What is sent.
        in_flight: Calls in flight, on all connections together.
        seconds: Duration, after a quarter of it as warm-up.

    Returns:
        Answers per second, and processor seconds of the generator per second.

    Raises:
        RuntimeError: A call failed.
    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        callers = [job.caller() for _ in range(CONNECTIONS)]
        for at in range(in_flight):
            callers[at % CONNECTIONS].start()
        list(pool.map(_cycle, callers, [seconds / 4] * CONNECTIONS))
        started, busy = clock(), time.process_time()
        answered = sum(pool.map(_cycle, callers, [seconds] * CONNECTIONS))
        elapsed, busy = (clock() - started) / 1e9, time.process_time() - busy
        for at in range(in_flight):
            callers[at % CONNECTIONS].finish()
    for caller in callers:
        caller.close()
    return answered / elapsed, busy / elapsed


def _cycle(caller: UnaryCaller, seconds: float) -> int:
    answered, until = 0, clock() + int(seconds * 1e9)
    while clock() < until:
        if not caller.finish().succeeded:
            raise RuntimeError("a call of the closed loop failed")
        answered += 1
        caller.start()
    return answered


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
    busy, origin = time.process_time(), clock() + HEAD_START
    with ThreadPoolExecutor(connections + 1) as pool:
        sending = pool.submit(_send, callers, (due + origin).tolist())
        ends = [end for found in pool.map(_finish, callers, shares) for end in found]
        sending.result()
    generator_seconds = time.process_time() - busy
    for caller in callers:
        caller.close()
    details = [_details(end.status) for end in ends]
    started = np.array([end.started for end in ends], np.int64)
    return Outcomes(
        due=(started - origin) / 1e9,
        seconds=(np.array([end.ended for end in ends], np.int64) - started) / 1e9,
        codes=np.array([CODES[end.status.code()] for end in ends]),
        reasons=np.array([reason for reason, _ in details]),
        retry_after=np.array([retry for _, retry in details]),
        generator_seconds=generator_seconds,
    )


def _finish(caller: UnaryCaller, count: int) -> list[Completion]:
    return [caller.finish() for _ in range(count)]


def _send(callers: Sequence[UnaryCaller], due: Sequence[int]) -> None:
    for caller, moment in zip(cycle(callers), due, strict=False):
        if (wait := moment - clock()) > 0:
            time.sleep(wait / 1e9)
        caller.start(moment)


def _details(status: object) -> tuple[str, bool]:
    """The reason in a status, and whether it says when to try again."""
    trailing = dict(status.trailing_metadata() or ())  # type: ignore[attr-defined]  # of cygrpc
    found = status_pb2.Status.FromString(trailing.get(DETAILS_KEY, b""))
    info, reason, retry = error_details_pb2.ErrorInfo(), "", False
    for detail in found.details:
        retry = retry or detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        if detail.Unpack(info):
            reason = info.reason
    return reason, retry


def at_once(job: Job, count: int, deadline_seconds: float) -> Outcomes:
    """Makes many calls at once on one connection."""
    return open_loop(job, np.zeros(count, np.int64), deadline_seconds, connections=1)
