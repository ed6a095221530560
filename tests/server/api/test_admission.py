"""Limits of calls and connections; whoever sends or reads nothing keeps nobody from being served."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as open_inference_pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server import grpc_server
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request
from tests.server.seams import PATIENCE_SECONDS, Served

ATTEND = "/attention.v1.AttentionService/Attend"


class Opened:
    """Calls that send their headers and nothing else until they are closed."""

    def __init__(self, served: Served, method: str, count: int) -> None:
        self._never: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._channel = served.connect()
        grpc.channel_ready_future(self._channel).result(PATIENCE_SECONDS)
        opened: Any = self._channel.stream_unary(method)
        self.calls = [opened.future(self._messages(), timeout=PATIENCE_SECONDS) for _ in range(count)]

    def _messages(self) -> Iterator[bytes]:
        self._never.get()
        return
        yield b""

    def codes(self) -> set[grpc.StatusCode]:
        return {call.code() for call in self.calls}

    def close(self) -> None:
        for _ in self.calls:
            self._never.put(None)
        self._channel.close()


def wait_until_waiting(served: Served, count: int) -> None:
    """Until that many calls wait for their messages."""
    until = time.monotonic() + PATIENCE_SECONDS
    while served.server.load().waiting != count:
        assert time.monotonic() < until, served.server.load()
        threading.Event().wait(0.01)


def attend(served: Served) -> list[int]:
    with served.connect() as channel:
        reply = AttentionServiceStub(channel).Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
    return list(reply.context_vectors.lengths)


def test_calls_without_a_message_take_no_place(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=2) as served:
        opened = Opened(served, ATTEND, 64)
        wait_until_waiting(served, 64)
        assert attend(served) == [2]
        opened.close()
        assert served.calls.ended(65)["Attend", "OK"] == 1
        wait_until_waiting(served, 0)


def test_calls_that_wait_are_bounded(self_model: LoadedModel) -> None:
    with Served(self_model, max_waiting_calls=4) as served:
        opened = Opened(served, ATTEND, 4)
        wait_until_waiting(served, 4)
        with pytest.raises(grpc.RpcError) as caught:
            attend(served)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with served.connect() as channel:
            stub = GRPCInferenceServiceStub(channel)
            request = open_inference_pb.ServerLiveRequest()
            assert stub.ServerLive(request, timeout=PATIENCE_SECONDS).live
        opened.close()
        wait_until_waiting(served, 0)
        assert attend(served) == [2]
    assert served.calls.refusals == [("Attend", "OVERLOADED")]


def test_a_call_beyond_the_limit_is_refused_at_once_and_one_that_infers_nothing_is_not(
    self_model: LoadedModel,
) -> None:
    with Served.held(self_model, max_concurrent_calls=1) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]))
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS).models
        served.gate.open()
        assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]


def test_calls_that_infer_nothing_are_bounded_among_themselves(self_model: LoadedModel) -> None:
    with Served(self_model, max_waiting_calls=3) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS) for _ in range(3)]
        for news in watching:
            next(news)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert attend(served) == [2]
        for news in watching:
            news.cancel()


def test_the_names_of_unknown_services_are_kept_while_they_are_watched(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        watchers = served.server._health._servicer._send_response_callbacks
        stub = health_pb2_grpc.HealthStub(served.channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=PATIENCE_SECONDS)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert [len(name) for name in watchers] == [5000]
        watching.cancel()
        until = time.monotonic() + PATIENCE_SECONDS
        while watchers:
            assert time.monotonic() < until
            threading.Event().wait(0.01)


def test_connections_beyond_the_limit_are_closed(self_model: LoadedModel) -> None:
    with Served(self_model, max_connections=2) as served, served.connect() as other:
        for channel in (served.channel, other):
            assert attend_on(channel) == [2]
        assert served.server.load().connections == 2
        with pytest.raises(grpc.RpcError) as caught:
            attend(served)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        other.close()
        assert served.server.load().connections == 2  # they are not counted each time


def test_a_connection_without_calls_is_closed(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "COUNT_SECONDS", 0.0)
    with Served(self_model, connection_idle_seconds=0.2) as served:
        assert attend_on(served.channel) == [2]
        until = time.monotonic() + PATIENCE_SECONDS
        while served.server.load().connections:
            assert time.monotonic() < until
            threading.Event().wait(0.05)
        assert attend_on(served.channel) == [2]


def attend_on(channel: grpc.Channel) -> list[int]:
    reply = AttentionServiceStub(channel).Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
    return list(reply.context_vectors.lengths)


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
