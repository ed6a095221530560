"""Large requests and replies: handled on codec threads, and dropped when their call has ended."""

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import inference
from attention_serving.server.api.attention.service import Attend, AttendStream
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import LARGE_BYTES, of_names
from attention_serving.server.coroutines import Task
from attention_serving.server.engine.errors import DeadlineExceededError, EngineError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.tokenizer import FEW_TEXTS
from attention_serving.server.transport.call import Call
from tests.server.api.messages import attend_request
from tests.server.api.scripted import ScriptedCall, started
from tests.server.samples import TEXT
from tests.server.seams import WatchedEngine
from tests.support.coroutines import run

LARGE_REQUEST, LARGE_REPLY = 200, 500
SMALL, LARGE = attend_request([2]), attend_request([20])


class SteppedThreads(CodecThreads):
    """Does what it is given when the test says, on the test's thread."""

    def __init__(self) -> None:
        super().__init__(0)

    def work(self) -> int:
        """Does what waits; returns how much that was. What follows from it waits then."""
        count = self._queue.qsize()
        self._queue.put(None)
        self._run()
        return count


class World(NamedTuple):
    """The methods of an engine, for which few bytes are many."""

    engine: WatchedEngine
    threads: SteppedThreads
    unary: Attend
    stream: AttendStream

    def started(self, *, is_streamed: bool = False) -> ScriptedCall:
        return started((self.stream if is_streamed else self.unary).method())

    @property
    def held_bytes(self) -> int:
        return self.engine.budget.held_bytes


@pytest.fixture
def world(
    self_model: LoadedModel, text_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(inference, "LARGE_BYTES", LARGE_REQUEST)
    monkeypatch.setattr(inference, "LARGE_REPLY_BYTES", LARGE_REPLY)
    engine, threads = WatchedEngine([self_model, text_model], Limits()), SteppedThreads()
    yield World(engine, threads, Attend(engine, threads), AttendStream(engine, threads))
    engine.close()


@pytest.mark.parametrize(
    ("request_", "before", "after"),
    [
        (SMALL, [0], 0),
        (LARGE, [1, 1, 0], 0),  # parsed, and decoded; more is reserved than the result needs
        (attend_request([9], return_weights=True), [0], 1),
        (attend_request([20], return_weights=True), [1, 1, 0], 1),
    ],
    ids=["small", "large request", "large reply", "both large"],
)
def test_what_is_large_is_decoded_and_encoded_on_codec_threads(
    world: World, request_: pb.AttendRequest, before: list[int], after: int
) -> None:
    call, data = world.started(), request_.SerializeToString()
    call.deliver(data)
    assert world.held_bytes >= len(data)
    assert [world.threads.work() for _ in before] == before
    call.run_posted()  # the result
    assert len(call.sent) == 1 - after
    assert world.threads.work() == after
    reply = pb.AttendResponse.FromString(call.sent[0])
    assert reply.context_vectors.lengths == request_.query.lengths
    assert world.held_bytes > len(data)
    call.complete()
    assert world.held_bytes == 0


def test_a_large_request_that_is_recognised_needs_no_codec_thread(world: World) -> None:
    sent = []
    for steps in (1, 0):
        call = world.started()
        call.deliver(LARGE.SerializeToString())
        assert [world.threads.work() for _ in range(2)] == [steps] * 2
        call.run_posted()
        sent += call.sent
    assert sent[0] == sent[1]


def test_many_texts_are_decoded_on_a_codec_thread_whose_error_ends_the_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "LARGE_BYTES", LARGE_BYTES)
    texts = pb.TextSequences(texts=["?"] * (FEW_TEXTS + 1))
    call = world.started()
    call.deliver(pb.AttendRequest(model_name=TEXT, text=texts).SerializeToString())
    assert (world.threads.work(), call.ended_with) == (1, grpc.StatusCode.INVALID_ARGUMENT)
    call.complete()
    assert world.held_bytes == 0


@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("stage", ["parse", "decode", "encode"])
def test_what_a_call_that_has_ended_gave_to_a_codec_thread_is_dropped(
    world: World, stage: str, *, is_streamed: bool
) -> None:
    """Its memory is held until the thread has left it."""
    request = attend_request([20], return_weights=True)
    call = world.started(is_streamed=is_streamed)
    message = pb.AttendStreamRequest(request=request) if is_streamed else request
    call.deliver(message.SerializeToString())
    if stage != "parse":
        world.threads.work()
    if stage == "encode":
        world.threads.work()
        call.run_posted()
        assert world.engine.has_queued(1)
    call.cancel()
    assert world.held_bytes >= request.ByteSize()
    assert world.threads.work() == 1
    assert not world.engine.has_queued_more()
    assert (call.sent, world.held_bytes, world.threads.work()) == ([], 0, 0)


def test_a_request_of_a_stream_without_memory_is_refused_in_its_place(world: World) -> None:
    """Before anything of it is decoded."""
    taken = world.engine.budget.reserve(world.engine.limits.max_in_flight_bytes)
    call = world.started(is_streamed=True)
    call.deliver(pb.AttendStreamRequest(id="first", request=LARGE).SerializeToString())
    reply = pb.AttendStreamResponse.FromString(call.sent[0])
    assert (reply.id, reply.error.reason, call.ended_with) == ("first", "OVERLOADED", None)
    assert world.threads.work() == 0
    taken.release()
    call.complete_send()
    call.deliver(pb.AttendStreamRequest(id="second", request=SMALL).SerializeToString())
    call.run_posted()
    assert pb.AttendStreamResponse.FromString(call.sent[1]).HasField("response")


def fail(error: Exception) -> None:
    raise error


def test_work_that_fails_does_not_end_a_codec_thread(threads: CodecThreads) -> None:
    for error in (ValueError("unexpected"), EngineError("expected")) * 2:
        with pytest.raises(type(error), match="expected"):
            run(threads.run(partial(fail, error), math.inf))
    assert run(threads.run(lambda: threading.current_thread().name, math.inf)) == "codec"


def test_work_that_is_too_late_or_whose_task_has_ended_is_not_done() -> None:
    threads, done = SteppedThreads(), list[str]()
    errors: list[Exception] = []

    async def late() -> None:
        try:
            await threads.run(partial(done.append, "late"), 0.0)
        except DeadlineExceededError as error:
            errors.append(error)

    def now(callback: Callable[[], object]) -> None:
        callback()

    ended = Task(threads.run(partial(done.append, "ended"), math.inf), now)
    for task in (Task(late(), now), ended):
        task.resume()
    ended.close()
    threads.work()
    assert (done, len(errors)) == ([], 1)


def test_a_request_of_names_has_a_limit_of_its_own() -> None:
    handled: list[bytes] = []

    def handle(request: bytes, _call: Call) -> None:
        handled.append(request)

    call = started(of_names(bytes, handle, right=None))
    call.deliver(bytes(LARGE_BYTES + 1))
    assert (handled, call.ended_with) == ([], grpc.StatusCode.INVALID_ARGUMENT)
