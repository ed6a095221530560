"""Unary calls: invalid calls are refused, deadlines are kept, and every call is counted once."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.transport.completion_queue import ACCEPT_AHEAD
from tests.server.api.messages import answered, attend_request, raw_request, reserved_bytes
from tests.server.samples import validated_of
from tests.server.seams import PATIENCE_SECONDS, Served

ATTEND = "/attention.v1.AttentionService/Attend"
PLACES, FLOOD = 8, 5 * ACCEPT_AHEAD
BRIEF_SECONDS = 0.1
GOOD = attend_request([2]).SerializeToString()
QUERY = np.ones((1, 2, 4), np.float32)


def refusal(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


def assert_answers(channel: grpc.Channel) -> None:
    answer = AttentionServiceStub(channel).Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
    assert answer.context_vectors.lengths == [2]


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("/attention.v1.AttentionService/Nothing", GOOD, grpc.StatusCode.UNIMPLEMENTED),
        ("/nobody.Nothing/Attend", GOOD, grpc.StatusCode.UNIMPLEMENTED),
        (ATTEND, b"\xff" * 9, grpc.StatusCode.INVALID_ARGUMENT),
        (ATTEND, b"\xff" * 90_000, grpc.StatusCode.INVALID_ARGUMENT),
        (ATTEND, GOOD[:-1], grpc.StatusCode.INVALID_ARGUMENT),
        (ATTEND, bytes(2 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("/grpc.health.v1.Health/Check", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=[
        "unknown method",
        "unknown service",
        "malformed",
        "malformed, large",
        "cut off",
        "too large",
        "health",
    ],
)
def test_an_invalid_call_is_refused_and_does_not_affect_others(
    self_model: LoadedModel, method: str, message: bytes, code: grpc.StatusCode
) -> None:
    with Served.held(self_model) as served:
        other = AttentionServiceStub(served.channel).Attend.future(
            attend_request([3]), timeout=PATIENCE_SECONDS
        )
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        call: Any = served.channel.unary_unary(method)
        for _ in range(PLACES + 1):
            assert refusal(lambda: call(message, timeout=PATIENCE_SECONDS)) is code
        served.gate.open()
        assert list(other.result(PATIENCE_SECONDS).context_vectors.lengths) == [3]
        assert_answers(served.channel)


@pytest.mark.parametrize("method", [ATTEND, "/grpc.health.v1.Health/Watch"], ids=["unary", "server stream"])
def test_a_call_that_ends_before_its_message_is_refused(self_model: LoadedModel, method: str) -> None:
    """The code is that of gRPC's statuscodes.md for a violation of cardinality."""
    with Served(self_model) as served:
        call: Any = served.channel.stream_stream(method)
        code = refusal(lambda: list(call(iter(()), timeout=5)))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert_answers(served.channel)


def test_a_call_whose_deadline_passes_in_the_queue_is_not_run(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        code = refusal(lambda: stub.Attend(attend_request([3]), timeout=BRIEF_SECONDS))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        served.calls.ended(1)
        served.gate.open()
        held.result(PATIENCE_SECONDS)
        assert_answers(served.channel)
    assert [run.tokens for run in served.engine.recorder.runs] == [2, 2]


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
def test_the_timeout_of_a_request_is_kept_during_a_run(self_model: LoadedModel, waits: bool) -> None:
    message = raw_request(self_model, {"query": QUERY})
    message.parameters["timeout"].int64_param = int(BRIEF_SECONDS * 1e6)
    with Served.held(self_model) as served:
        if waits:
            held = AttentionServiceStub(served.channel).Attend.future(
                attend_request([3]), timeout=PATIENCE_SECONDS
            )
            assert served.gate.entered.wait(PATIENCE_SECONDS)
        stub = GRPCInferenceServiceStub(served.channel)
        assert refusal(lambda: stub.ModelInfer(message)) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert served.calls.ended(1) == {("ModelInfer", "DEADLINE_EXCEEDED"): 1}
        served.gate.open()
        message.parameters["timeout"].int64_param = int(PATIENCE_SECONDS * 1e6)
        assert answered(stub.ModelInfer(message))["context_vectors"].shape == QUERY.shape
        if waits:
            held.result(PATIENCE_SECONDS)
    assert [run.tokens for run in served.engine.recorder.runs] == ([3, 2] if waits else [2, 2])


def test_a_cancelled_call_releases_its_memory_and_its_slot(self_model: LoadedModel) -> None:
    size = reserved_bytes(attend_request([2]), validated_of(self_model, [(2, 2)]))
    limits = Limits(max_in_flight_bytes=2 * size)
    with Served.held(self_model, limits=limits, max_concurrent_calls=2) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        for count in range(1, 4):
            left = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
            assert served.engine.has_queued(1 + (count == 1))
            left.cancel()
            assert served.calls.ended(count) == {("Attend", "CANCELLED"): count}
        served.gate.open()
        held.result(PATIENCE_SECONDS)
    assert served.engine.recorder.sizes == [1]


def test_every_call_of_a_flood_is_answered_or_refused_and_counted_once(self_model: LoadedModel) -> None:
    with Served.held(self_model, max_concurrent_calls=PLACES) as served:
        stub = AttentionServiceStub(served.channel)
        calls = [stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS) for _ in range(FLOOD)]
        refused = ("Attend", "RESOURCE_EXHAUSTED")
        assert served.calls.ended(FLOOD - PLACES) == {refused: FLOOD - PLACES}
        served.gate.open()
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.OK) == PLACES
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == FLOOD - PLACES
        assert served.calls.ended(FLOOD) == {refused: FLOOD - PLACES, ("Attend", "OK"): PLACES}


def test_calls_are_counted_once_by_method_and_code(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        raw: Any = served.channel.unary_unary(ATTEND)
        for _ in range(2):
            assert_answers(served.channel)
        refusal(lambda: stub.Attend(pb.AttendRequest(model_name="nobody"), timeout=PATIENCE_SECONDS))
        refusal(lambda: raw(b"\xff", timeout=PATIENCE_SECONDS))
        stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS)
        expected = {
            ("Attend", "OK"): 2,
            ("Attend", "NOT_FOUND"): 1,
            ("Attend", "INVALID_ARGUMENT"): 1,
            ("ListModels", "OK"): 1,
        }
        assert served.calls.ended(5) == expected
    assert served.calls.ended(5) == expected


class Errors(logging.Handler):
    """Keeps the messages that are logged as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def errors() -> Iterator[Errors]:
    handler = Errors()
    logging.getLogger("attention_serving.server").addHandler(handler)
    yield handler
    logging.getLogger("attention_serving.server").removeHandler(handler)


def test_cancelled_calls_are_not_logged_as_errors(self_model: LoadedModel, errors: Errors) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        call = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        requests = [pb.AttendStreamRequest(request=attend_request([2])) for _ in range(2)]
        answers = stub.AttendStream(iter(requests), timeout=PATIENCE_SECONDS)
        assert served.engine.has_queued(3)
        call.cancel()
        answers.cancel()
        served.calls.ended(2)
    assert errors.messages == []


class FailingCalls:
    """An observer that fails at every call."""

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        raise RuntimeError(method, code, seconds)

    def refused(self, method: str, reason: str) -> None:
        raise RuntimeError(method, reason)

    def reader_cut(self, method: str) -> None:
        raise RuntimeError(method)


def test_an_observer_that_fails_affects_neither_replies_nor_limits(self_model: LoadedModel) -> None:
    with Served(self_model, observer=FailingCalls(), max_concurrent_calls=1) as served:
        for _ in range(2):
            assert_answers(served.channel)
