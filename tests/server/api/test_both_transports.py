"""One table of what callers see, for both transports: all other tests of the API use the first."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.guard import Guard
from attention_serving.server.transport import TransportKind
from tests.server.api.messages import attend_request
from tests.server.api.secured import ATTEND, STREAM
from tests.server.api.stopping import NOT_SERVING, SERVING, Stopping, watch
from tests.server.api.test_admission import Opened, unread, wait_for_places, wait_until_waiting
from tests.server.seams import PATIENCE_SECONDS, Served

Row = Callable[[Served], None]


def code_of(served: Served, message: bytes, method: str = ATTEND) -> grpc.StatusCode:
    call: Any = served.channel.unary_unary(method)
    code: grpc.StatusCode = call.future(message, timeout=PATIENCE_SECONDS).code()
    return code


def calls_are_answered_or_refused(served: Served) -> None:
    good = attend_request([2]).SerializeToString()
    assert code_of(served, good) is grpc.StatusCode.OK
    assert code_of(served, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(served, bytes(2 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(served, good, "/nobody.Nothing/Attend") is grpc.StatusCode.UNIMPLEMENTED
    assert len(served.calls.ended(3)) == 3


def replies_of_a_stream_keep_their_order(served: Served) -> None:
    names = [str(number) for number in range(20)]
    requests = [pb.AttendStreamRequest(id=name, request=attend_request([2])) for name in names]
    answers = AttentionServiceStub(served.channel).AttendStream(iter(requests), timeout=PATIENCE_SECONDS)
    assert [answer.id for answer in answers] == names


def a_message_that_does_not_arrive_ends_its_call(served: Served) -> None:
    opened = Opened(served, ATTEND, 3)
    assert opened.codes() == {grpc.StatusCode.DEADLINE_EXCEEDED}
    opened.close()
    assert served.calls.ended(3) == {("Attend", "DEADLINE_EXCEEDED"): 3}
    assert served.calls.refusals == [("Attend", "RECEIVE_TIMEOUT")] * 3
    wait_until_waiting(served, 0)


def a_caller_who_does_not_read_is_cut_off(served: Served) -> None:
    calls = [unread(served.channel) for _ in range(2)]
    served.calls.ended(2)
    assert served.calls.cut_readers == ["Attend"] * 2
    wait_for_places(served, 0)
    for call in calls:
        call.cancel()


def a_cancelled_call_gives_back_its_place(served: Served) -> None:
    method: Any = served.channel.stream_stream(STREAM, pb.AttendStreamRequest.SerializeToString)
    opened = method(iter([pb.AttendStreamRequest(request=attend_request([2]))]), timeout=PATIENCE_SECONDS)
    next(opened)
    opened.cancel()
    wait_for_places(served, 0)


def a_drain_ends_watchers_and_refuses_calls(served: Served) -> None:
    news = watch(served, "")
    assert next(news).status == SERVING
    stopping = Stopping(served, PATIENCE_SECONDS)
    assert next(news).status == NOT_SERVING
    stopping.wait()
    message = health_pb2.HealthCheckRequest().SerializeToString()
    assert code_of(served, message, "/grpc.health.v1.Health/Check") is grpc.StatusCode.UNAVAILABLE


ROWS: tuple[Row, ...] = (
    calls_are_answered_or_refused,
    replies_of_a_stream_keep_their_order,
    a_message_that_does_not_arrive_ends_its_call,
    a_caller_who_does_not_read_is_cut_off,
    a_cancelled_call_gives_back_its_place,
    a_drain_ends_watchers_and_refuses_calls,
)


@pytest.mark.parametrize("kind", TransportKind, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=[row.__name__ for row in ROWS])
def test_both_transports_show_callers_the_same(
    self_model: LoadedModel, kind: TransportKind, row: Row
) -> None:
    options: dict[str, Any] = {"send_timeout_seconds": 0.5, "receive_timeout_seconds": 0.5}
    with Served(self_model, transport=kind, **options) as served:
        row(served)


@pytest.mark.parametrize("kind", TransportKind, ids=str)
def test_both_transports_ask_for_a_token(self_model: LoadedModel, guard: Guard, kind: TransportKind) -> None:
    with Served(self_model, transport=kind, guard=guard) as served:
        call: Any = served.channel.unary_unary(ATTEND)
        message = attend_request([2]).SerializeToString()
        for token, code in [("all-token", grpc.StatusCode.OK), ("wrong", grpc.StatusCode.UNAUTHENTICATED)]:
            metadata = (("authorization", f"Bearer {token}"),)
            assert call.future(message, timeout=PATIENCE_SECONDS, metadata=metadata).code() is code
        assert code_of(served, message) is grpc.StatusCode.UNAUTHENTICATED
