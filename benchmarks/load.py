"""Issues load and measures it: closed loop, open loop. Runs in a process of its own, on one thread.

Closed loop: a fixed number of requests is in flight; each answer starts the next. Its latencies hide what
would have arrived while the server stalled (coordinated omission). Open loop: requests are due at times
drawn in advance, whatever the server does, and latency counts from when a request was due.
"""

import resource
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.arrivals import poisson
from benchmarks.callers import Caller, Completion, Request, StreamCaller, UnaryCaller, ask_once, clock
from benchmarks.channel import CallFailedError
from benchmarks.processor import family, processor_seconds
from benchmarks.wire import Api, decode, encode, method
from benchmarks.workload import Array, Lengths, Model, sequences

HEAD_START = 50_000_000
"""Nanoseconds from making a schedule to its start."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and what to ask of it."""

    address: str
    pid: int
    api: Api
    model: Model
    lengths: Lengths
    sequences_per_request: int = 1


@dataclass(frozen=True)
class Window:
    """How long to measure: at least so many seconds, and so many requests for each in flight."""

    seconds: float
    warm_seconds: float
    requests_each: int = 2


@dataclass(frozen=True, eq=False)
class LoadResult:
    """What was measured.

    Attributes:
        seconds: Length of the measured window.
        latencies: Nanoseconds of each request that was answered in it.
        sequences: Sequences of those.
        tokens: Query rows of those.
        failures: Requests that were refused or failed.
        client_seconds: Processor time of this process in the window.
        server_seconds: Processor time of the server and its children.
    """

    seconds: float
    latencies: NDArray[np.int64]
    sequences: int
    tokens: int
    failures: int
    client_seconds: float
    server_seconds: float


@lru_cache(maxsize=16)
def requests(endpoint: Endpoint) -> tuple[Request, ...]:
    """All requests that a endpoint is asked in turn, encoded."""
    pool, size = sequences(endpoint.model, endpoint.lengths), endpoint.sequences_per_request
    groups = [pool[at : at + size] for at in range(0, len(pool), size)]
    return tuple(
        Request(encode(endpoint.api, endpoint.model, group), len(group), sum(len(one[0]) for one in group))
        for group in groups
    )


def closed_loop(endpoint: Endpoint, in_flight: int, window: Window) -> LoadResult:
    """Keeps a number of requests in flight, warms up, measures, and waits for the last answers."""
    caller = _open(endpoint)
    for _ in range(in_flight):
        caller.start()
    _collect(caller, window.warm_seconds, in_flight)
    meter = _Meter(endpoint.pid)
    completions = _collect(caller, window.seconds, window.requests_each * in_flight)
    result = meter.read(completions)
    for _ in range(in_flight):
        caller.finish()
    caller.close()
    return result


def _collect(caller: Caller, seconds: float, least: int) -> list[Completion]:
    """Answers each completion by a new request, until time and number are reached."""
    completions: list[Completion] = []
    until = clock() + int(seconds * 1e9)
    while True:
        completion = caller.finish()
        caller.start()
        completions.append(completion)
        if completion.ended >= until and len(completions) >= least:
            return completions


def open_loop(endpoint: Endpoint, rate: float, seconds: float, seed: int) -> LoadResult:
    """Issues requests when they are due, and measures all of them from then."""
    caller = _open(endpoint)
    caller.start()
    caller.finish()  # the connection stands before the clock runs
    due = poisson(rate, seconds, seed=seed)
    meter = _Meter(endpoint.pid)
    sender = threading.Thread(target=_send, args=(caller, due + clock() + HEAD_START))
    sender.start()
    completions = [caller.finish() for _ in range(len(due))]
    sender.join()
    result = meter.read(completions)
    caller.close()
    return result


def _send(caller: Caller, due: NDArray[np.int64]) -> None:
    for moment in due.tolist():
        if (wait := moment - clock()) > 0:
            time.sleep(wait / 1e9)
        caller.start(moment)


def _open(endpoint: Endpoint) -> Caller:
    kind = StreamCaller if endpoint.api is Api.ATTENTION_STREAM else UnaryCaller
    return kind(endpoint.address, method(endpoint.api, endpoint.model), requests(endpoint))


class _Meter:
    """Clocks, from its making to `read`."""

    def __init__(self, pid: int) -> None:
        self._server = family(pid)
        self._server_seconds = processor_seconds(self._server)
        self._client_seconds = _own_seconds()
        self._started = clock()

    def read(self, completions: list[Completion]) -> LoadResult:
        """The window up to the last completion."""
        seconds = (completions[-1].ended - self._started) / 1e9
        client_seconds = _own_seconds() - self._client_seconds
        server_seconds = processor_seconds(self._server) - self._server_seconds
        answered = [one for one in completions if one.succeeded]
        return LoadResult(
            seconds=seconds,
            latencies=np.array([one.ended - one.started for one in answered], np.int64),
            sequences=sum(one.request.sequences for one in answered),
            tokens=sum(one.request.tokens for one in answered),
            failures=len(completions) - len(answered),
            client_seconds=client_seconds,
            server_seconds=server_seconds,
        )


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def ask(endpoint: Endpoint) -> list[Array]:
    """The answers to the first request, for a comparison of values.

    Raises:
        CallFailedError: There is no answer.
        ValueError: The answer is an error or does not parse.
    """
    first = requests(endpoint)[0]
    stream = endpoint.api is Api.ATTENTION_STREAM
    data = ask_once(endpoint.address, method(endpoint.api, endpoint.model), first, stream=stream)
    if endpoint.api is Api.ECHO:
        return [np.frombuffer(data, np.uint8)]
    return decode(endpoint.api, data, endpoint.model)


def soak(endpoints: tuple[Endpoint, ...], in_flight: int, seconds: float) -> int:
    """Asks several endpoints of one server in turn for so long; returns the number of answers.

    Raises:
        CallFailedError: A request was refused or failed.
    """
    in_turn = [request for group in zip(*map(requests, endpoints), strict=True) for request in group]
    first = endpoints[0]
    caller = UnaryCaller(first.address, method(first.api, first.model), in_turn)
    for _ in range(in_flight):
        caller.start()
    answered, until = 0, clock() + int(seconds * 1e9)
    while clock() < until:
        if not caller.finish().succeeded:
            raise CallFailedError(f"a request failed after {answered} answers")
        answered += 1
        caller.start()
    for _ in range(in_flight):
        caller.finish()
    caller.close()
    return answered + in_flight
