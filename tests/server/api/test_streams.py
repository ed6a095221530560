"""Ordered streams: order, window, and end."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import RunCost
from tests.server.api.messages import attend_request, reserved_bytes
from tests.server.samples import SELF, validated_of
from tests.server.seams import PATIENCE_SECONDS, Served, costing

STREAM = "/attention.v1.AttentionService/AttendStream"
WINDOW = 3
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


def test_replies_keep_the_order_of_requests_that_finish_out_of_order(self_model: LoadedModel) -> None:
    operations, _ = self_model.operations(1, 99, 99)
    model = costing(self_model, RunCost(call=0.5, row=1 / operations, pair=0))
    with Served.held(model) as served:
        stub = AttentionServiceStub(served.channel)
        first = stub.Attend.future(attend_request([1]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        requests = [of("slow", [1, 99]), of("quick", [1]), of("refused", [1], model="nobody")]
        answers = stub.AttendStream(iter(requests), timeout=PATIENCE_SECONDS)
        assert served.engine.has_queued(3)
        served.gate.open()
        assert [(answer.id, answer.WhichOneof("result")) for answer in answers] == [
            ("slow", "response"),
            ("quick", "response"),
            ("refused", "error"),
        ]
        first.result(PATIENCE_SECONDS)
    assert [(run.sequences, run.tokens) for run in served.engine.recorder.runs] == [(1, 1), (2, 2), (1, 99)]


def test_the_window_limits_requests_that_are_being_computed(self_model: LoadedModel) -> None:
    with Served.held(self_model, stream_window=WINDOW) as served:
        names = [str(number) for number in range(3 * WINDOW)]
        sent = Sent([of(name, [2]) for name in names])
        answers = AttentionServiceStub(served.channel).AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        sent.wait()
        assert served.engine.has_queued(WINDOW)
        make_round_trips(served)
        assert not served.engine.has_queued_more()
        served.gate.open()
        sent.end.set()
        assert ids(answers) == names


def test_the_window_limits_requests_whose_replies_are_not_read(self_model: LoadedModel) -> None:
    with Served(self_model, stream_window=WINDOW) as served:
        names = [str(number) for number in range(3 * WINDOW)]
        sent = Sent([of(name, [LARGE], large=True) for name in names])
        answers = AttentionServiceStub(served.channel).AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        sent.wait()
        assert served.engine.has_queued(WINDOW)
        make_round_trips(served)
        assert not served.engine.has_queued_more()
        sent.end.set()
        assert ids(answers) == names


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_stream_ends_with_ok_after_the_last_reply(self_model: LoadedModel, count: int) -> None:
    with Served(self_model) as served:
        names = [str(number) for number in range(count)]
        stub = AttentionServiceStub(served.channel)
        answers = stub.AttendStream(iter([of(name, [2]) for name in names]), timeout=PATIENCE_SECONDS)
        assert ids(answers) == names
        assert answers.code() is grpc.StatusCode.OK
        assert served.calls.ended(1) == {("AttendStream", "OK"): 1}


def test_a_request_is_answered_while_the_stream_is_open(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        sent = Sent([of("a", [2])])
        answers = AttentionServiceStub(served.channel).AttendStream(iter(sent), timeout=PATIENCE_SECONDS)
        assert next(answers).id == "a"
        sent.wait()
        sent.end.set()
        assert list(answers) == []


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
        assert next(other).id == "a"
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
