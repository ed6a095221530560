"""Sends mutated requests over gRPC and HTTP, with good ones in between. Runs in a process of its own."""

import http.client
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import grpc
import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.http.infer import HEADER_LENGTH
from tests.server.http.clients import HOST
from tests.support.contradictions import Made, good_and_contradicted
from tests.support.mutations import ATTEND, Good, mutated

IN_FLIGHT = 4
GOOD_EVERY = 20
PATIENCE_SECONDS = 60.0
# Of the contradictory messages, as many again are changed byte by byte.
BYTES_SHARE = 0.3
RTOL, ATOL = 1e-4, 1e-5
Array = np.ndarray[Any, np.dtype[Any]]
NOTHING: Array = np.empty(0)
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# How a request may end whose bytes are arbitrary: nothing fails unexpectedly.
ALLOWED = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
    *("FAILED_PRECONDITION", "200", "400", "404", "413", "415", "422", "429", "503", "504"),
}


@dataclass
class Outcome:
    """How many requests ended how, those that must not end like that, and the size of the largest."""

    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, bytes]] = field(default_factory=list)
    largest: int = 0


class Answer(NamedTuple):
    """The status and the numbers of an answer."""

    code: str
    numbers: Array

    def is_like(self, code: str, numbers: Array) -> bool:
        """Whether another answer is the same, but for the rounding of another batch."""
        is_alike = self.numbers.shape == numbers.shape and np.allclose(numbers, self.numbers, RTOL, ATOL)
        return code == self.code and is_alike


class Sender:
    """Connections to one server, and its answers to the good requests."""

    def __init__(self, target: str, http_port: int) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._http_port = http_port
        self._local = threading.local()
        self._requests = good_and_contradicted()
        self._answers = [self._answer(good) for good, _ in self._requests]

    def send(self, seed: int, count: int, *, good_every: int = GOOD_EVERY) -> Outcome:
        """Sends requests that depend on the seed only; of so many, one is good."""
        rng = random.Random(seed)  # noqa: S311 - the same mutations every time
        outcome, lock, places = Outcome(), threading.Lock(), threading.Semaphore(2 * IN_FLIGHT)

        def one(made: Made, expected: Answer | None) -> None:
            code, numbers = self._answer(made)
            with lock:
                outcome.codes[code] += 1
                if code not in ALLOWED or not (expected is None or expected.is_like(code, numbers)):
                    outcome.wrong.append((made.method, code, made.data[:100]))
            places.release()

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for number in range(count):
                index = rng.randrange(len(self._requests))
                good, contradict = self._requests[index]
                made, expected = self._changed(good, contradict, rng), None
                if number % good_every == 0:
                    made, expected = good, self._answers[index]
                outcome.largest = max(outcome.largest, len(made.data))
                places.acquire()
                pool.submit(one, made, expected)
        return outcome

    @staticmethod
    def _changed(good: Made, contradict: Callable[[random.Random], Made], rng: random.Random) -> Made:
        if good.headers is None and rng.random() < BYTES_SHARE:
            return Made(good.method, mutated(Good(good.method, good.data), rng))
        return contradict(rng)

    def _answer(self, made: Made) -> Answer:
        return self._call(made) if made.headers is None else self._post(made)

    def _call(self, made: Made) -> Answer:
        call: Any = self._channel.unary_unary(made.method)
        try:
            reply = call(made.data, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as caught:
            error: Any = caught  # a call
            return Answer(error.code().name, NOTHING)
        if made.method == ATTEND:
            vectors = typed.AttendResponse.FromString(reply).context_vectors
            return Answer("OK", np.frombuffer(vectors.data, "<f4"))
        response = pb.ModelInferResponse.FromString(reply)
        outputs = zip(response.outputs, response.raw_output_contents, strict=True)
        data = b"".join([raw for own, raw in outputs if own.datatype == "FP32"])
        return Answer("OK", np.frombuffer(data, "<f4"))

    def _post(self, made: Made) -> Answer:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(
                HOST, self._http_port, timeout=PATIENCE_SECONDS
            )
        connection: http.client.HTTPConnection = self._local.connection
        for _ in range(2):  # the server may have closed a connection that was idle
            try:
                connection.request("POST", made.method, made.data, made.headers or {})
                response = connection.getresponse()
                return Answer(str(response.status), _numbers(response, response.read()))
            except (http.client.HTTPException, OSError):
                connection.close()
        return Answer("closed", NOTHING)


def _numbers(response: http.client.HTTPResponse, body: bytes) -> Array:
    """The numbers of JSON, or those after it."""
    size = response.getheader(HEADER_LENGTH)
    if response.status != HTTPStatus.OK:
        return NOTHING
    if size is not None:
        return np.frombuffer(body[int(size) :], "<f4")
    return np.array([float(number) for number in NUMBER.findall(body)])


_sender: dict[str, Sender] = {}


def send(target: str, http_port: int, seed: int, count: int, good_every: int = GOOD_EVERY) -> Outcome:
    """Sends requests over the connections of this process."""
    if target not in _sender:
        _sender[target] = Sender(target, http_port)
    return _sender[target].send(seed, count, good_every=good_every)
