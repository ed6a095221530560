"""What callers see of either transport: all other tests of the API use the first."""

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, get_args

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2 as infer_pb
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.guard import Guard
from attention_serving.server.settings import TransportKind
from tests.server.api.messages import attend_request
from tests.server.api.served import (
    ATTEND,
    NOT_SERVING,
    SERVING,
    STREAM,
    Opened,
    OpenStream,
    Stopping,
    answer,
    attend,
    health,
    refusal,
    watch,
)
from tests.server.seams import PATIENCE_SECONDS, Served, wait_until

GOOD = attend_request([2]).SerializeToString()
# Makes a reply of half a megabyte, several times what a caller takes without reading.
LARGE = attend_request([256], return_weights=True)
INFER = "/inference.GRPCInferenceService/ModelInfer"
INFER_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# A drain without work takes less; one that waits for a silent peer takes PATIENCE_SECONDS.
AT_ONCE_SECONDS = 5.0


def unread(served: Served) -> Any:
    """A call by a caller who reads nothing: a client that expects a stream reads only when asked to."""
    method: Any = served.channel.unary_stream(ATTEND, pb.AttendRequest.SerializeToString)
    return method(LARGE, timeout=PATIENCE_SECONDS)


def code_of(served: Served, message: bytes, method: str = ATTEND) -> str:
    call: Any = served.channel.unary_unary(method)
    code: grpc.StatusCode = call.future(message, timeout=PATIENCE_SECONDS).code()
    return code.name


def calls_are_answered_or_refused(served: Served) -> None:
    assert code_of(served, GOOD) == "OK"
    for bad in (b"\xff", b"\xff" * 90_000, GOOD[:-1]):
        assert code_of(served, bad) == "INVALID_ARGUMENT"
    assert code_of(served, bytes(2 << 20)) == "RESOURCE_EXHAUSTED"
    assert len(served.calls.ended(5)) == 3
    assert code_of(served, b"\xff", "/grpc.health.v1.Health/Check") == "INVALID_ARGUMENT"
    assert code_of(served, GOOD * 2000, "/grpc.health.v1.Health/Check") == "INVALID_ARGUMENT"
    assert code_of(served, GOOD, "/nobody.Nothing/Attend") == "UNIMPLEMENTED"


def replies_of_a_stream_keep_their_order_and_a_malformed_message_does_not_end_it(served: Served) -> None:
    stream, names = OpenStream(served.channel), [str(number) for number in range(20)]
    for name in names:
        stream.send(name)
    assert [next(stream.replies).id for _ in names] == names
    other: Any = served.channel.stream_stream(STREAM, None, pb.AttendStreamResponse.FromString)
    replies = list(other(iter([b"\xff", b""]), timeout=PATIENCE_SECONDS))
    assert [reply.error.reason for reply in replies] == ["INVALID_FIELD", "MODEL_NOT_FOUND"]
    stream.end()
    assert list(stream.replies) == []
    assert stream.replies.code() is grpc.StatusCode.OK


def a_message_that_does_not_arrive_ends_its_call(served: Served) -> None:
    opened = Opened(served, 3)
    assert opened.codes() == {grpc.StatusCode.DEADLINE_EXCEEDED}
    opened.close()
    assert served.calls.ended(3) == {("Attend", "DEADLINE_EXCEEDED"): 3}
    assert served.calls.refusals == ["RECEIVE_TIMEOUT"] * 3
    wait_until(lambda: served.server.load().waiting_calls == 0)


def a_caller_who_does_not_read_is_cut_off(served: Served) -> None:
    large = pb.AttendStreamRequest(request=LARGE)
    method: Any = served.channel.stream_stream(STREAM, pb.AttendStreamRequest.SerializeToString)
    calls = [unread(served), method(iter([large] * 8), timeout=PATIENCE_SECONDS)]
    served.calls.ended(2)
    assert served.calls.refusals == ["SLOW_READER"] * 2
    wait_until(lambda: served.server.load().open_calls == 0)
    for call in calls:
        call.cancel()


def a_drain_ends_watchers_idle_streams_and_silent_calls(served: Served) -> None:
    news, stream = watch(served.channel), OpenStream(served.channel)
    assert next(news).status == SERVING
    stream.ask()
    opened = Opened(served, 2)
    wait_until(lambda: served.server.load().waiting_calls == 2)
    stopping = Stopping(served)
    assert next(news).status == NOT_SERVING
    for call in (news, stream.replies):
        assert refusal(call) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert opened.codes() == {grpc.StatusCode.UNAVAILABLE}
    stopping.wait(AT_ONCE_SECONDS)
    assert health(served.channel) is grpc.StatusCode.UNAVAILABLE
    stream.end()
    opened.close()


def callers_are_asked_for_a_token(served: Served) -> None:
    assert answer(attend(served.channel, caller="all-token")) == [2]
    assert health(served.channel) == SERVING  # which needs none
    for wrong in ("unknown", None):
        assert attend(served.channel, caller=wrong).code() is grpc.StatusCode.UNAUTHENTICATED


def streams_that_wait_hold_no_message_and_refusals_are_counted_once(served: Served) -> None:
    request = pb.AttendRequest(model_name="unknown", query=attend_request([20_000]).query)
    infer = infer_pb.ModelInferRequest(model_name="unknown", raw_input_contents=[bytes(300_000)])
    assert [code_of(served, b"\xff", path) for path in (ATTEND, INFER)] == ["INVALID_ARGUMENT"] * 2
    for path, message in ((STREAM, pb.AttendStreamRequest(request=request)), (INFER_STREAM, infer)):
        content, proceed = message.SerializeToString(), threading.Event()
        tracemalloc.start()
        try:
            method: Any = served.channel.stream_stream(path)
            stream = method(then_wait(content, proceed), timeout=PATIENCE_SECONDS)
            next(stream)
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < 200_000)
        finally:
            tracemalloc.stop()
        proceed.set()
        assert list(stream) == []
    assert served.calls.ended(4).total() == 4
    assert served.calls.refusals == ["INVALID_FIELD"] * 2 + ["MODEL_NOT_FOUND"] * 2


def then_wait(message: bytes, proceed: threading.Event) -> Iterator[bytes]:
    yield message
    proceed.wait(PATIENCE_SECONDS)


IMPATIENT: dict[str, Any] = {"message_timeout_seconds": 0.5}
# By what is shown, settings of the server.
ROWS: dict[Callable[[Served], None], dict[str, Any]] = {
    calls_are_answered_or_refused: {},
    replies_of_a_stream_keep_their_order_and_a_malformed_message_does_not_end_it: {},
    streams_that_wait_hold_no_message_and_refusals_are_counted_once: {},
    a_message_that_does_not_arrive_ends_its_call: IMPATIENT,
    a_caller_who_does_not_read_is_cut_off: IMPATIENT,
    a_drain_ends_watchers_idle_streams_and_silent_calls: {},
}


@pytest.mark.parametrize("kind", get_args(TransportKind))
@pytest.mark.parametrize("row", [*ROWS, callers_are_asked_for_a_token], ids=lambda row: row.__name__)
def test_both_transports_show_callers_the_same(
    self_model: LoadedModel, guard: Guard, kind: TransportKind, row: Callable[[Served], None]
) -> None:
    settings = ROWS.get(row, {"guard": guard})
    with Served(self_model, transport=kind, **settings) as served:
        row(served)
