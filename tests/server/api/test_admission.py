"""Calls that wait for their messages, and calls that infer nothing, keep nobody from being served."""

import queue
import threading
import time
from collections import Counter
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
from tests.server.seams import PATIENCE_SECONDS, Calls, Served

ATTEND = "/attention.v1.AttentionService/Attend"
BURST = 5000


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


def test_a_message_that_does_not_arrive_ends_its_call(self_model: LoadedModel) -> None:
    with Served(self_model, receive_timeout_seconds=0.2) as served:
        opened = Opened(served, ATTEND, 3)
        assert opened.codes() == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert "0.2 seconds" in opened.calls[0].details()
        opened.close()
        assert served.calls.ended(3) == {("Attend", "DEADLINE_EXCEEDED"): 3}
        assert served.calls.refusals == [("Attend", "RECEIVE_TIMEOUT")] * 3
        wait_until_waiting(served, 0)


def test_calls_that_infer_nothing_are_answered_while_every_place_is_taken(self_model: LoadedModel) -> None:
    with Served.held(self_model, max_concurrent_calls=1) as served:
        held = AttentionServiceStub(served.channel).Attend.future(attend_request([2]))
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        ours, open_inference = (
            AttentionServiceStub(served.channel),
            GRPCInferenceServiceStub(served.channel),
        )
        name = self_model.name
        assert ours.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS).models
        ours.GetModel(pb.GetModelRequest(name=name), timeout=PATIENCE_SECONDS)
        for method, request in [
            (open_inference.ServerLive, open_inference_pb.ServerLiveRequest()),
            (open_inference.ServerReady, open_inference_pb.ServerReadyRequest()),
            (open_inference.ServerMetadata, open_inference_pb.ServerMetadataRequest()),
            (open_inference.ModelReady, open_inference_pb.ModelReadyRequest(name=name)),
            (open_inference.ModelMetadata, open_inference_pb.ModelMetadataRequest(name=name)),
            (open_inference.ModelConfig, open_inference_pb.ModelConfigRequest(name=name)),
        ]:
            method(request, timeout=PATIENCE_SECONDS)  # type: ignore[operator]
        served.gate.open()
        held.result(PATIENCE_SECONDS)


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


def test_a_stream_that_is_idle_too_long_ends(self_model: LoadedModel) -> None:
    with Served(self_model, stream_idle_seconds=0.2) as served:
        messages: queue.SimpleQueue[pb.AttendStreamRequest] = queue.SimpleQueue()
        stub = AttentionServiceStub(served.channel)
        stream = stub.AttendStream(iter(messages.get, None), timeout=PATIENCE_SECONDS)
        for _ in range(2):
            messages.put(pb.AttendStreamRequest(request=attend_request([2])))
            assert next(stream).HasField("response")
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.calls.ended(1) == {("AttendStream", "UNAVAILABLE"): 1}
        assert served.calls.refusals == [("AttendStream", "STREAM_IDLE")]
        assert served.server.load().streams == 0


class BusyCalls(Calls):
    """Occupies the transport's thread for a second when the first call ends: meanwhile, calls pile up."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = True

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        if self._is_first:
            self._is_first = False
            threading.Event().wait(1)
        super().call_ended(method, code, seconds)


@pytest.mark.parametrize("places", [8, BURST], ids=["refused", "served"])
def test_a_burst_on_one_connection_is_served_or_refused_and_counted(
    self_model: LoadedModel, places: int
) -> None:
    observed = BusyCalls()
    options: dict[str, Any] = {"max_concurrent_calls": places, "max_calls_per_connection": BURST}
    with Served(self_model, observer=observed, **options) as served:
        stub = AttentionServiceStub(served.channel)
        calls = [stub.Attend.future(attend_request([2]), timeout=2 * PATIENCE_SECONDS) for _ in range(BURST)]
        codes = Counter(call.code() for call in calls)
        assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert codes[grpc.StatusCode.OK] > 0
        counted = observed.ended(BURST)
        assert counted == {("Attend", code.name): count for code, count in codes.items()}


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
