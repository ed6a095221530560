"""Ordered streams of a real server: order, window, cancellation and end."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request, reserved_bytes
from tests.server.api.secured import STREAM
from tests.server.samples import SELF, validated_of
from tests.server.seams import PATIENCE_SECONDS, Served

WINDOW = 3
NAMES = [str(number) for number in range(3 * WINDOW)]
# Makes a reply of half a megabyte, ten times what a connection buffers.
LARGE = 256


def of(name: str, lengths: list[int], *, model: str = SELF, large: bool = False) -> pb.AttendStreamRequest:
    message = attend_request(lengths, return_weights=large)
    message.model_name = model
    return pb.AttendStreamRequest(id=name, request=message)


class Sent:
    """Requests of a stream that stays open until `end` is set; `wait` returns once all were taken."""

    def __init__(self, requests: Iterable[pb.AttendStreamRequest]) -> None:
        self._requests = requests
        self._all = threading.Event()
        self.end = threading.Event()

    def __iter__(self) -> Iterator[pb.AttendStreamRequest]:
        yield from self._requests
        self._all.set()
        self.end.wait(PATIENCE_SECONDS)

    def wait(self) -> None:
        assert self._all.wait(PATIENCE_SECONDS)


def make_round_trips(served: Served) -> None:
    """Returns when the server has handled everything that was sent before."""
    with served.connect() as channel:
        for _ in range(5):
            AttentionServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS)


def ids(answers: Iterable[pb.AttendStreamResponse]) -> list[str]:
    return [answer.id for answer in answers]


def test_the_window_limits_requests_whose_replies_are_not_read(self_model: LoadedModel) -> None:
    with Served(self_model, stream_window=WINDOW) as served:
        sent = Sent([of(name, [LARGE], large=True) for name in NAMES])
        answers = AttentionServiceStub(served.channel).AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        sent.wait()
        assert served.engine.has_queued(WINDOW)
        make_round_trips(served)
        assert not served.engine.has_queued_more()
        sent.end.set()
        assert ids(answers) == NAMES


def test_a_cancelled_stream_cancels_its_requests(self_model: LoadedModel) -> None:
    size = reserved_bytes(of("0", [2]), validated_of(self_model, [(2, 2)]))
    limits = Limits(max_in_flight_bytes=(1 + WINDOW) * size)
    with Served.held(self_model, limits=limits, stream_window=WINDOW) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        sent = Sent([of(str(number), [2]) for number in range(WINDOW)])
        answers = stub.AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        assert served.engine.has_queued(1 + WINDOW)
        answers.cancel()
        assert served.calls.ended(1) == {("AttendStream", "CANCELLED"): 1}
        others = [stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS) for _ in range(WINDOW)]
        assert served.engine.has_queued(WINDOW)
        served.gate.open()
        for call in [held, *others]:
            assert list(call.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
        sent.end.set()
    assert sum(served.engine.recorder.sizes) == 1 + WINDOW


def test_a_malformed_message_ends_its_stream_and_no_other(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        sent = Sent([of("a", [2])])
        other = AttentionServiceStub(served.channel).AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        assert next(other).id == "a"  # while its stream is open
        good = of("b", [2]).SerializeToString()
        call: Any = served.channel.stream_stream(STREAM)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([good, b"\xff", good]), timeout=PATIENCE_SECONDS))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        sent.end.set()
        assert list(other) == []
        assert other.code() is grpc.StatusCode.OK


def test_a_stream_beyond_the_limit_is_refused_and_does_not_count(self_model: LoadedModel) -> None:
    with Served(self_model, max_streams=1, max_concurrent_calls=2) as served:
        stub = AttentionServiceStub(served.channel)
        sent = Sent([of("a", [2])])
        first = stub.AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        assert next(first).id == "a"
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.AttendStream(iter([of("b", [2])]), timeout=PATIENCE_SECONDS))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Attend(attend_request([2]), timeout=PATIENCE_SECONDS).context_vectors.lengths == [2]
        sent.end.set()
        assert list(first) == []
        assert ids(stub.AttendStream(iter([of("c", [2])]), timeout=PATIENCE_SECONDS)) == ["c"]
