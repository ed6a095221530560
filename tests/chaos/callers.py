"""Callers of the drains, kills and the soak: each repeats a request, compares answers and counts statuses."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from attention_client import AttentionClient, AttentionClientError

from attention_serving.model.presets import build_preset
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from tests.chaos.process import MODEL, OWN_CONNECTION, attend_message, random_rows
from tests.support.eager import ATOL, RTOL, Array, attend

CALL_SECONDS = 60.0
OK = "OK"
ATTEND = "/attention.v1.AttentionService/Attend"


class Question:
    """A request to multi-head-768x12, and the answer of eager PyTorch: rows and context vectors, (T, d)."""

    def __init__(self, rows: int) -> None:
        self.rows = random_rows(rows)
        self.message = attend_message(MODEL, self.rows)
        self._answer = attend(build_preset(MODEL), self.rows)[0]

    def is_answered_by(self, response: pb.AttendResponse) -> bool:
        """Whether a response holds the answer."""
        data = np.frombuffer(response.context_vectors.data, np.float32)
        return data.size == self._answer.size and self.matches(data.reshape(self._answer.shape))

    def matches(self, vectors: Array) -> bool:
        """Whether context vectors are the answer."""
        return bool(np.allclose(vectors, self._answer, rtol=RTOL, atol=ATOL))


@dataclass
class Tally:
    """What some callers saw. For any thread.

    Attributes:
        statuses: Calls by status.
        wrong: Answers that are not those of eager PyTorch.
        last_answer: When the last call or message was answered, on `time.monotonic`'s clock.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    last_answer: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, *, right: bool = True, status: str = OK) -> None:
        """Counts an answer."""
        with self._lock:
            self.statuses[status] += 1
            self.wrong += not right
            self.last_answer = max(self.last_answer, time.monotonic())

    def failed(self, error: grpc.RpcError | AttentionClientError) -> None:
        """Counts a call that failed."""
        code = error.code if isinstance(error, AttentionClientError) else error.code()
        with self._lock:
            self.statuses[code.name if code else "no status"] += 1


class Actor(threading.Thread):
    """A thread that repeats a step until it is stopped or the step returns False.

    Attributes:
        error: What a step raised, which ended the thread; empty if none did.
    """

    def __init__(self, step: Callable[[], object], close: Callable[[], object] = lambda: None) -> None:
        super().__init__(daemon=True)
        self._step, self._close = step, close
        self._stopping = threading.Event()
        self.error = ""
        self.start()

    def run(self) -> None:
        """Body of the thread."""
        try:
            while not self._stopping.is_set() and self._step() is not False:
                pass
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._close()

    def stop(self) -> None:
        """Lets the current step be the last."""
        self._stopping.set()


def stop(actors: list[Actor]) -> None:
    """Stops actors and waits for their last steps."""
    for actor in actors:
        actor.stop()
    for actor in actors:
        actor.join(CALL_SECONDS)


def unary(target: str, question: Question, tally: Tally) -> Actor:
    """Calls on one connection until one fails."""
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    attend = AttentionServiceStub(channel).Attend
    return Actor(
        lambda: count(attend.future(question.message, timeout=CALL_SECONDS), question, tally), channel.close
    )


def retrying(
    targets: str | Sequence[str], question: Question, tally: Tally, *, pause: float = 0, **options: Any
) -> Actor:
    """Calls of attention_client with retries, which go on whatever happens, with a pause before each."""
    client = AttentionClient(targets, **options)

    def step() -> None:
        time.sleep(pause)
        try:
            result = client.attend(MODEL, question.rows)
        except AttentionClientError as error:
            tally.failed(error)
        else:
            tally.answered(right=question.matches(result.context_vectors))

    return Actor(step, client.close)


def stream(
    target: str, question: Question, tally: Tally, *, window: int = 4, quiet: threading.Event | None = None
) -> Actor:
    """A stream with some requests under way, until it ends.

    Args:
        target: The server.
        question: What is asked.
        tally: Counts the answers, and the status of the stream.
        window: Requests under way; 0 for an idle stream.
        quiet: Once it is set, no more requests are sent, and the stream stays open.
    """
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    requests: queue.SimpleQueue[pb.AttendStreamRequest | None] = queue.SimpleQueue()
    request = pb.AttendStreamRequest(request=question.message)
    for _ in range(window):
        requests.put(request)
    responses = AttentionServiceStub(channel).AttendStream(iter(requests.get, None))

    def step() -> bool:
        try:
            for response in responses:
                is_answer = response.HasField("response")
                right = not is_answer or question.is_answered_by(response.response)
                tally.answered(
                    right=right, status=OK if is_answer else f"stream error {response.error.reason}"
                )
                if quiet is None or not quiet.is_set():
                    requests.put(request)
            tally.statuses[responses.code().name] += 1
        except grpc.RpcError as error:
            tally.failed(error)
        requests.put(None)
        return False

    return Actor(step, channel.close)


@contextmanager
def headers_only(channel: grpc.Channel, count: int) -> Iterator[list[Any]]:
    """Calls that send their headers, and no message until the block ends."""
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        over.wait(CALL_SECONDS)
        yield from ()

    method: Any = channel.stream_unary(ATTEND)
    try:
        yield [method.future(messages()) for _ in range(count)]
    finally:
        over.set()


def unread(channel: grpc.Channel, message: pb.AttendRequest) -> Any:
    """A call by a caller who reads nothing: a client that expects a stream reads only when asked to."""
    method: Any = channel.unary_stream(ATTEND, pb.AttendRequest.SerializeToString)
    return method(message)


def count(call: "grpc.Future[pb.AttendResponse]", question: Question, tally: Tally) -> bool:
    """Waits for the end of a call and counts it; returns whether it succeeded."""
    try:
        response = call.result()
    except grpc.RpcError as error:
        tally.failed(error)
        return False
    tally.answered(right=question.is_answered_by(response))
    return True
