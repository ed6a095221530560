"""The load generator: closed loop and open loop. It runs in a process of its own, on one thread.

Closed loop: a fixed number of requests is in flight, and each response starts the next request. Its latencies
do not include the requests that would have arrived during a stall of the server (coordinated omission).
Open loop: requests are due at moments drawn in advance, independent of the server, and latency counts from
the moment at which a request was due.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle

import numpy as np
from numpy.typing import NDArray

from benchmarks.channel import Caller, Completion, EncodedRequest, StreamCaller, UnaryCaller, clock
from benchmarks.processes import process_tree, processor_seconds
from benchmarks.wire import METHODS, Api, decode, encode
from benchmarks.workload import Array, Lengths, Model, groups

HEAD_START = 50_000_000
"""Nanoseconds between drawing a schedule and its start."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and the requests to send to it. `pid` is 0 if the server's process is unknown."""

    address: str
    pid: int
    api: Api
    model: Model
    lengths: Lengths
    per_request: int = 1


@dataclass(frozen=True)
class MeasurementWindow:
    """Duration of a closed-loop measurement.

    Attributes:
        seconds: Minimum duration.
        warm_seconds: Minimum duration of the load before it.
    """

    seconds: float
    warm_seconds: float


@dataclass(frozen=True, eq=False)
class LoadResult:
    """A measurement under load.

    Attributes:
        seconds: Duration of the measured window.
        latencies: Nanoseconds of each request that was answered in the window.
        sequences: Sequences in those requests.
        tokens: Query rows in those requests.
        failures: Requests that were refused or failed.
        server_seconds: Processor time of the server and its child processes in the window.
    """

    seconds: float
    latencies: NDArray[np.int64]
    sequences: int
    tokens: int
    failures: int
    server_seconds: float


def poisson(rate: float, seconds: float, *, seed: int) -> NDArray[np.int64]:
    """Draws arrival times of a Poisson process, in nanoseconds after its start.

    Args:
        rate: Average requests per second.
        seconds: Duration of the process.
        seed: Seed of the random generator.
    """
    rng = np.random.default_rng(seed)
    count = max(1, int(rate * seconds))
    # Given their number, the arrivals of a Poisson process are uniform over its duration.
    return np.sort(rng.uniform(0, seconds * 1e9, count)).astype(np.int64)


@lru_cache(maxsize=16)
def encoded_requests(endpoint: Endpoint) -> tuple[EncodedRequest, ...]:
    """Encodes all requests that are sent to an endpoint in turn."""
    model = endpoint.model
    return tuple(
        EncodedRequest(encode(endpoint.api, model, group), len(group), sum(map(len, group)))
        for group in groups(model, endpoint.lengths, endpoint.per_request)
    )


def closed_loop(endpoint: Endpoint, in_flight: int, window: MeasurementWindow) -> LoadResult:
    """Measures an endpoint in a closed loop."""
    return measure(_open(endpoint), endpoint.pid, in_flight, window)


def measure(caller: Caller, pid: int, in_flight: int, window: MeasurementWindow) -> LoadResult:
    """Keeps `in_flight` requests in flight, warms up, measures, waits for the last responses, and closes."""
    for _ in range(in_flight):
        caller.start()
    _exchange(caller, window.warm_seconds, in_flight)
    result = _summarise(pid, lambda: _exchange(caller, window.seconds, 2 * in_flight))
    for _ in range(in_flight):
        caller.finish()
    caller.close()
    return result


def _exchange(caller: Caller, seconds: float, minimum: int) -> list[Completion]:
    """Starts a new request after each completion, until both the time and the number are reached."""
    completions: list[Completion] = []
    until = clock() + int(seconds * 1e9)
    while True:
        completion = caller.finish()
        caller.start()
        completions.append(completion)
        if completion.ended >= until and len(completions) >= minimum:
            return completions


def open_loop(endpoint: Endpoint, rate: float, seconds: float, seed: int) -> LoadResult:
    """Sends requests when they are due, and measures all of them from that moment."""
    caller = _open(endpoint)
    caller.start()
    caller.finish()  # establishes the connection before the schedule starts
    due = poisson(rate, seconds, seed=seed)
    result = _summarise(endpoint.pid, lambda: send_when_due([caller], due + clock() + HEAD_START))
    caller.close()
    return result


def send_when_due(callers: Sequence[Caller], due: NDArray[np.int64]) -> list[Completion]:
    """Sends a request at each moment of `clock`, by the callers in turn; returns how they ended."""

    def send() -> None:
        for caller, moment in zip(cycle(callers), due.tolist(), strict=False):
            if (wait := moment - clock()) > 0:
                time.sleep(wait / 1e9)
            caller.start(moment)

    # One thread sends for all: the more threads wake, the later each of them notes an end.
    with ThreadPoolExecutor(len(callers) + 1) as pool:
        sending = pool.submit(send)
        counts = [len(due[at :: len(callers)]) for at in range(len(callers))]
        ends = list(pool.map(lambda caller, count: [caller.finish() for _ in range(count)], callers, counts))
        sending.result()
    return [*chain.from_iterable(ends)]


def _open(endpoint: Endpoint) -> Caller:
    kind = StreamCaller if endpoint.api is Api.ATTENTION_STREAM else UnaryCaller
    return kind(endpoint.address, METHODS[endpoint.api], encoded_requests(endpoint))


def _summarise(pid: int, send: Callable[[], list[Completion]]) -> LoadResult:
    """Sends a load, and measures its wall-clock and processor time up to the last completion."""
    server = process_tree(pid) if pid else []
    server_seconds, started = processor_seconds(server), clock()
    completions = send()
    answered = [completion for completion in completions if completion.succeeded]
    requests = [completion.request for completion in answered]
    return LoadResult(
        seconds=(completions[-1].ended - started) / 1e9,
        latencies=np.array([answer.ended - answer.started for answer in answered], np.int64),
        sequences=sum(request.sequences for request in requests),
        tokens=sum(request.tokens for request in requests),
        failures=len(completions) - len(answered),
        server_seconds=processor_seconds(server) - server_seconds,
    )


def first_response(endpoint: Endpoint) -> list[Array]:
    """Returns the context vectors of the first request, (T, d) each; for the echo, the bytes it returned.

    Raises:
        CallFailedError: The call failed.
        ValueError: The response reports an error or does not parse.
    """
    caller = _open(endpoint)
    try:
        caller.start()
        return decode(endpoint.api, caller.receive(), endpoint.model)
    finally:
        caller.close()
