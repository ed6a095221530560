"""Every request to a loaded model is reported once, with how it ended."""

import time

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.engine.errors import DeadlineExceededError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request, raw_request
from tests.server.samples import SELF
from tests.server.seams import PATIENCE_SECONDS, FailOnMarked, Held, Served, mark, outcome


def test_answered_requests_are_reported_by_model(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        requests = [held.submit([(2, 2), (3, 3)], seed=seed) for seed in range(3)]
    for request in requests:
        outcome(request)
    assert held.recorder.answered == [SELF] * 4  # one is the run that was held
    assert held.recorder.failed == []


def test_a_request_without_a_result_is_reported_with_its_code(self_model: LoadedModel) -> None:
    faults = FailOnMarked()
    with Held(self_model, faults) as held:
        broken = held.submit([(2, 2), (3, 3)], seed=1)
        faults.marks.add(mark(broken))
        late = held.submit([(2, 2)], seed=2, deadline=time.monotonic())
        cancelled = held.submit([(2, 2)], seed=3)
        held.engine.fail(cancelled, None)
        assert cancelled.is_done
    for request, error in ((broken, RunFailedError), (late, DeadlineExceededError)):
        with pytest.raises(error):
            outcome(request)
    assert cancelled.outcome is None
    assert held.recorder.answered == [SELF]
    found = sorted(held.recorder.failed)
    assert found == [(SELF, "CANCELLED"), (SELF, "DEADLINE_EXCEEDED"), (SELF, "INTERNAL")]


def test_a_call_that_the_caller_cancelled_too_late_counts_as_expired(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        request = held.submit([(2, 2)], deadline=time.monotonic())
        held.engine.fail(request, None)
    assert held.recorder.failed == [(SELF, "DEADLINE_EXCEEDED")]


def test_requests_that_do_not_fit_their_model_are_reported(self_model: LoadedModel) -> None:
    limits = Limits(max_sequence_length=4)
    with Served(self_model, limits=limits) as served:
        typed, open_inference = AttentionServiceStub(served.channel), GRPCInferenceServiceStub(served.channel)
        for call in (
            lambda: typed.Attend(attend_request([5]), timeout=PATIENCE_SECONDS),
            lambda: typed.Attend(pb.AttendRequest(model_name=SELF), timeout=PATIENCE_SECONDS),
            lambda: open_inference.ModelInfer(raw_request(self_model, {}), timeout=PATIENCE_SECONDS),
        ):
            with pytest.raises(grpc.RpcError):
                call()
        streamed = typed.AttendStream(
            iter([pb.AttendStreamRequest(id="1", request=attend_request([5]))]), timeout=PATIENCE_SECONDS
        )
        assert next(streamed).error.reason == "LIMIT_EXCEEDED"
        recorder = served.engine.recorder
    assert recorder.failed == [(SELF, "INVALID_ARGUMENT")] * 4
    assert recorder.answered == []


def test_requests_to_unknown_models_are_not_reported(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        request = pb.AttendRequest(model_name="unknown")
        with pytest.raises(grpc.RpcError):
            AttentionServiceStub(served.channel).Attend(request, timeout=PATIENCE_SECONDS)
        assert served.calls.ended(1) == {("Attend", "NOT_FOUND"): 1}
        recorder = served.engine.recorder
    assert (recorder.answered, recorder.failed) == ([], [])
