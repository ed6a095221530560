"""A server that stops: what was accepted is answered, and everybody else sees UNAVAILABLE."""

import queue
import threading
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request
from tests.server.api.stopping import NOT_SERVING, SERVING, Stopping, watch
from tests.server.api.test_admission import ATTEND, Opened, wait_until_waiting
from tests.server.seams import PATIENCE_SECONDS, Served

ROUNDS = 3
CALLERS = 3
# A drain without work takes less; one that waits for somebody who keeps silent takes PATIENCE_SECONDS.
AT_ONCE_SECONDS = 5.0


def reason_of(call: Any) -> str:
    """The reason that a call was refused for."""
    info = error_details_pb2.ErrorInfo()
    status: Any = rpc_status.from_call(call)
    assert status.details[0].Unpack(info)
    reason: str = info.reason
    return reason


def ended(stream: Any) -> grpc.StatusCode:
    """The code that a stream without further messages ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    return caught.value.code()


class Messages:
    """The requests of a stream that stays open."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        self._messages.put(message)

    def __iter__(self) -> Any:
        return iter(self._messages.get, None)


def opened_stream(served: Served, messages: Messages) -> Any:
    return AttentionServiceStub(served.channel).AttendStream(iter(messages), timeout=PATIENCE_SECONDS)


def test_watchers_and_idle_streams_do_not_hold_a_drain(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        news = watch(served, "")
        assert next(news).status == SERVING
        messages = Messages()
        stream = opened_stream(served, messages)
        messages.put(pb.AttendStreamRequest(request=attend_request([2])))
        assert next(stream).HasField("response")
        opened = Opened(served, ATTEND, 2)
        wait_until_waiting(served, 2)

        stopping = Stopping(served, PATIENCE_SECONDS)
        assert next(news).status == NOT_SERVING
        for call in (news, stream):
            assert ended(call) is grpc.StatusCode.UNAVAILABLE
            assert reason_of(call) == "SHUTTING_DOWN"
        assert opened.codes() == {grpc.StatusCode.UNAVAILABLE}
        stopping.wait()
        assert stopping.seconds[0] < AT_ONCE_SECONDS
        messages.put(None)
        opened.close()


def test_a_stream_gets_its_outstanding_replies_and_then_ends(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        messages = Messages()
        stream = opened_stream(served, messages)
        for name in ("a", "b"):
            messages.put(pb.AttendStreamRequest(id=name, request=attend_request([2])))
        assert served.engine.has_queued(2)
        stopping = Stopping(served, PATIENCE_SECONDS)
        wait_until_draining(served)
        assert stopping.goes_on
        served.gate.open()
        assert [next(stream).id, next(stream).id] == ["a", "b"]
        assert ended(stream) is grpc.StatusCode.UNAVAILABLE
        stopping.wait()
        messages.put(None)


def wait_until_draining(served: Served) -> None:
    """Returns when new calls are refused, or not connected."""
    with served.connect() as other:
        while health(other) is not None:
            pass


def health(channel: grpc.Channel) -> Any:
    """The health of the server; None if it takes no new connections."""
    method: Any = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    call = method.future(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    if call.code() is grpc.StatusCode.OK:
        return call.result()
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    return None


def test_a_connection_with_an_open_call_stays_and_refuses_others(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        with served.connect() as other:
            assert health(other).status == SERVING
            stopping = Stopping(served, PATIENCE_SECONDS)
            while health(other) is not None:
                pass
        refused = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(refused) == "SHUTTING_DOWN"
        assert health(served.channel).status == NOT_SERVING
        served.gate.open()
        assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
        stopping.wait()


class Caller:
    """Opens calls all the time, on a connection of its own, and counts how they end."""

    def __init__(self, served: Served) -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self._ended = threading.Event()
        self._channel = served.connect()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        stub = AttentionServiceStub(self._channel)
        while not self._ended.is_set():
            calls = [stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS) for _ in range(8)]
            self.codes.update(call.code() for call in calls)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._channel.close()


def test_calls_that_race_the_end_of_a_server_are_answered_or_unavailable(self_model: LoadedModel) -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    for _ in range(ROUNDS):
        with Served(self_model, max_concurrent_calls=64) as served:
            callers = [Caller(served) for _ in range(CALLERS)]
            served.calls.ended(100)
            seconds = served.server.stop(PATIENCE_SECONDS)
            time.sleep(0.02)  # for calls that come too late
            for caller in callers:
                caller.end()
                codes += caller.codes
            assert seconds < AT_ONCE_SECONDS
    assert codes.keys() == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
