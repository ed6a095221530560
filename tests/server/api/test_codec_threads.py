"""Large requests and replies: handled on codec threads, and dropped when their call has ended."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import inference
from attention_serving.server.api.attention.handlers import Attend, AttendStream
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request
from tests.server.api.scripted import started
from tests.server.seams import WatchedEngine
from tests.support.coroutines import reserve, run

LARGE_REQUEST, LARGE_RESERVATION = 200, 1500
SMALL, LARGE = attend_request([2]), attend_request([20])


class Stepped(Executor):
    """Does what it is given when the test says, on the test's thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":  # type: ignore[override]
        future: Future[Any] = Future()
        self._waiting.append((future, work))
        return future

    def work(self) -> int:
        """Does what waits; returns how much that was. What follows from it waits then."""
        waiting, self._waiting = self._waiting, []
        for future, work in waiting:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        return len(waiting)


class World(NamedTuple):
    """The methods of an engine, for which few bytes are many."""

    engine: WatchedEngine
    threads: Stepped
    unary: Attend
    stream: AttendStream

    @property
    def held_bytes(self) -> int:
        return self.engine.budget.held_bytes


@pytest.fixture
def world(models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(inference, "LARGE_BYTES", LARGE_REQUEST)
    monkeypatch.setattr(inference, "LARGE_RESERVATION_BYTES", LARGE_RESERVATION)
    engine, stepped = WatchedEngine([*models.values()], Limits()), Stepped()
    threads = CodecThreads(stepped)
    yield World(engine, stepped, Attend(engine, threads), AttendStream(engine, threads))
    engine.close()


@pytest.mark.parametrize(
    ("request_", "before", "after"),
    [
        (SMALL, [0], 0),
        (LARGE, [1, 1, 0], 0),  # parsed, and decoded
        (attend_request([9], return_weights=True), [0], 1),
    ],
    ids=["small", "large request", "large reply"],
)
def test_large_work_is_moved(world: World, request_: pb.AttendRequest, before: list[int], after: int) -> None:
    call, data = started(world.unary.method()), request_.SerializeToString()
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


@pytest.mark.parametrize("stage", ["parse", "decode", "encode"])
def test_what_a_call_that_has_ended_gave_to_a_codec_thread_is_dropped(world: World, stage: str) -> None:
    """Its memory is held until the thread has left it."""
    request = attend_request([20], return_weights=True)
    call = started(world.unary.method())
    call.deliver(request.SerializeToString())
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
    reserve(world.engine.budget, world.engine.limits.max_in_flight_bytes)
    call = started(world.stream.method())
    call.deliver(pb.AttendStreamRequest(id="first", request=LARGE).SerializeToString())
    reply = pb.AttendStreamResponse.FromString(call.sent[0])
    assert (reply.id, reply.error.reason, call.status_code) == ("first", "OVERLOADED", None)
    assert world.threads.work() == 0


def test_work_that_is_too_late_is_not_done(threads: CodecThreads) -> None:
    with pytest.raises(DeadlineExceededError):
        run(threads.run(pytest.fail, 0.0))


def test_work_for_threads_that_have_ended_fails_where_it_is_awaited(threads: CodecThreads) -> None:
    threads.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        run(threads.run(int, math.inf))
