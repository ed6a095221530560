"""Unary calls: invalid calls are refused, deadlines are kept, and every call is counted once."""

import weakref
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.transport.completion_queue import ACCEPT_AHEAD
from tests.server.api.messages import answered, attend_request, raw_request
from tests.server.seams import PATIENCE_SECONDS, Served, tapped

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
        ("/nobody.Nothing/Attend", GOOD, grpc.StatusCode.UNIMPLEMENTED),
        (ATTEND, b"\xff" * 90_000, grpc.StatusCode.INVALID_ARGUMENT),
        (ATTEND, GOOD[:-1], grpc.StatusCode.INVALID_ARGUMENT),
        (ATTEND, bytes(2 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("/grpc.health.v1.Health/Check", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=[
        "unknown service",
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
        for _ in range(2):
            assert refusal(lambda: call(message, timeout=PATIENCE_SECONDS)) is code
        served.gate.open()
        assert list(other.result(PATIENCE_SECONDS).context_vectors.lengths) == [3]
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


def test_the_timeout_of_a_request_is_kept_during_a_run(self_model: LoadedModel) -> None:
    message = raw_request(self_model, {"query": QUERY})
    message.parameters["timeout"].int64_param = int(BRIEF_SECONDS * 1e6)
    with Served.held(self_model) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        assert refusal(lambda: stub.ModelInfer(message)) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert served.calls.ended(1) == {("ModelInfer", "DEADLINE_EXCEEDED"): 1}
        served.gate.open()
        message.parameters["timeout"].int64_param = int(PATIENCE_SECONDS * 1e6)
        assert answered(stub.ModelInfer(message))["context_vectors"].shape == QUERY.shape
    assert [run.tokens for run in served.engine.recorder.runs] == [2, 2]


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


@pytest.mark.usefixtures("no_collector")
def test_answered_requests_are_freed_without_the_garbage_collector(self_model: LoadedModel) -> None:
    seen: list[weakref.ref[Any]] = []
    with Served(tapped(self_model, lambda inputs: seen.append(weakref.ref(inputs["query"])))) as served:
        stub = AttentionServiceStub(served.channel)
        for _ in range(10):
            stub.Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
            requests = [pb.AttendStreamRequest(request=attend_request([3])) for _ in range(3)]
            assert len(list(stub.AttendStream(iter(requests), timeout=PATIENCE_SECONDS))) == 3
        assert len(seen) >= 20
        # The thread of the last run may not have released its inputs yet.
        assert sum(reference() is not None for reference in seen) <= 1
