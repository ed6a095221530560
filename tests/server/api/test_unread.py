"""Replies that callers do not read: they keep their places until they are sent, and are cut off in time."""

import time
from typing import Any

import grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request
from tests.server.seams import PATIENCE_SECONDS, Served

ATTEND = "/attention.v1.AttentionService/Attend"
STREAM = "/attention.v1.AttentionService/AttendStream"
PLACES = 4
# Makes a reply of half a megabyte, several times what a caller takes without reading.
LARGE = 256


def large() -> pb.AttendRequest:
    return attend_request([LARGE], return_weights=True)


def unread(channel: grpc.Channel) -> Any:
    """A call by a caller who reads nothing: a client that expects a stream reads only when asked to."""
    method: Any = channel.unary_stream(ATTEND, pb.AttendRequest.SerializeToString)
    return method(large(), timeout=PATIENCE_SECONDS)


def wait_for_places(served: Served, count: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while served.server.load().calls != count:
        assert time.monotonic() < until, served.server.load()
        time.sleep(0.01)


def refusal(served: Served) -> grpc.StatusCode | None:
    with served.connect() as channel:
        call = AttentionServiceStub(channel).Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        code: grpc.StatusCode = call.code()
        return code


def test_a_reply_that_is_not_read_keeps_its_place_until_it_is(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=PLACES, send_timeout_seconds=0) as served:
        calls = [unread(served.channel) for _ in range(PLACES)]
        assert served.engine.has_queued(PLACES)
        assert refusal(served) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            assert len(list(call)) == 1
        wait_for_places(served, 0)
        assert refusal(served) is grpc.StatusCode.OK
        counted = served.calls.ended(PLACES + 2)
        assert counted == {("Attend", "OK"): PLACES + 1, ("Attend", "RESOURCE_EXHAUSTED"): 1}
        assert served.calls.cut_readers == []


def test_a_caller_who_does_not_read_is_cut_off_and_counted(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=PLACES, send_timeout_seconds=0.3) as served:
        calls = [unread(served.channel) for _ in range(PLACES)]
        served.calls.ended(PLACES)
        assert served.calls.cut_readers == ["Attend"] * PLACES
        wait_for_places(served, 0)
        assert refusal(served) is grpc.StatusCode.OK
        for call in calls:
            call.cancel()


def test_a_stream_whose_caller_does_not_read_is_cut_off(self_model: LoadedModel) -> None:
    with Served(self_model, send_timeout_seconds=0.3) as served:
        stub = AttentionServiceStub(served.channel)
        stream = stub.AttendStream(
            iter([pb.AttendStreamRequest(request=large())] * 8), timeout=PATIENCE_SECONDS
        )
        assert sum(served.calls.ended(1).values()) == 1
        assert served.calls.cut_readers == ["AttendStream"]
        wait_for_places(served, 0)
        stream.cancel()


def test_a_caller_who_leaves_while_a_reply_waits_counts_once(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=PLACES) as served:
        calls = [unread(served.channel) for _ in range(PLACES)]
        assert served.engine.has_queued(PLACES)
        refusal(served)
        for call in calls:
            call.cancel()
        wait_for_places(served, 0)
        assert sum(served.calls.ended(PLACES + 1).values()) == PLACES + 1
        assert served.calls.cut_readers == []
