"""Which identity may call which method, with which model, and how much of the server it may hold."""

from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as oip
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.api.admission import check_share
from attention_serving.server.engine.errors import IdentityLimitError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.peers import ACCESS_CHECK, SEPARATOR
from attention_serving.server.transport.call import Metadata
from tests.server.api.messages import attend_request
from tests.server.api.served import ATTEND, STREAM, Opened, OpenStream, Secured, attend, bearer, refusal
from tests.server.samples import CROSS, SELF
from tests.server.seams import PATIENCE_SECONDS, Served, wait_until
from tests.server.security.samples import signed

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
LOGS = "/inference.GRPCInferenceService/LogSettings"
OK, NOT_FOUND = grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def headers_only(served: Served, method: str, metadata: Metadata) -> tuple[grpc.StatusCode, str]:
    """Code and reason of a call of which nothing but the headers is ever sent."""
    opened = Opened(served, 1, method, metadata)
    found = refusal(opened.calls[0])
    opened.close()
    return found


@pytest.mark.parametrize(
    ("method", "metadata", "expected"),
    [
        (ATTEND, (), (UNAUTHENTICATED, "CREDENTIALS_MISSING")),
        (STREAM, bearer("wrong"), (UNAUTHENTICATED, "TOKEN_INVALID")),
        (LOAD, bearer("old-token"), (UNAUTHENTICATED, "TOKEN_EXPIRED")),
        (ATTEND, bearer("reader-token"), (DENIED, "RIGHT_MISSING")),
        (STREAM, bearer("reader-token"), (DENIED, "RIGHT_MISSING")),
        (LOGS, bearer("caller-token"), (DENIED, "RIGHT_MISSING")),
    ],
)
def test_refusals_come_before_a_message(
    secured: Secured, method: str, metadata: Metadata, expected: Any
) -> None:
    assert headers_only(secured.served, method, metadata) == expected
    assert secured.served.server.load().waiting_calls == 0
    assert secured.served.calls.ended(1) == {(method.rsplit("/", 1)[1], expected[0].name): 1}


def test_a_known_caller_is_answered_and_readiness_is_open(secured: Secured) -> None:
    channel = secured.served.channel
    for token in ("caller-token", signed()):
        assert attend(channel, caller=token).code() is OK
    assert GRPCInferenceServiceStub(channel).ServerReady(oip.ServerReadyRequest()).ready


def test_a_model_of_others_is_denied_before_anything_else_of_the_message(secured: Secured) -> None:
    stub = AttentionServiceStub(secured.served.channel)

    def asked(token: str, name: str, **fields: Any) -> Any:
        request = pb.AttendRequest(model_name=name, **fields)
        return stub.Attend.future(request, metadata=bearer(token), timeout=PATIENCE_SECONDS)

    denied = asked("other-token", SELF, output_data_type=pb.DATA_TYPE_BOOL)
    assert refusal(denied) == (DENIED, "RIGHT_MISSING")
    assert denied.details() == "the identity 'other' does not have the right infer for model 'tiny-self'"
    # Neither whether a model exists nor the names of others are told to those who may not use or read them.
    assert asked("other-token", "absent").code() is DENIED
    for token, learns in (("caller-token", False), ("all-token", True)):
        call = asked(token, "tiny-x")
        assert (call.code(), SELF in call.details()) == (NOT_FOUND, learns)
    stream = OpenStream(secured.served.channel, "caller-token")
    assert stream.ask(model="absent").error.reason == "RIGHT_MISSING"
    assert stream.ask().HasField("response")
    stream.end()


@pytest.mark.parametrize(
    ("token", "name", "code"),
    [
        ("caller-token", "org/self", OK),
        ("all-token", "org/later", NOT_FOUND),
        ("other-token", "org/self", DENIED),
        ("other-token", "unknown-alias", DENIED),
    ],
)
def test_rights_are_those_of_the_model_that_an_alias_leads_to_and_errors_do_not_name_it(
    secured: Secured, token: str, name: str, code: grpc.StatusCode
) -> None:
    stream = OpenStream(secured.served.channel, "caller-token")
    assert stream.ask(model="org/self").response.model_name == SELF  # whose request is cached then
    message = attend_request([2])
    message.model_name = name
    stub = AttentionServiceStub(secured.served.channel)
    call = stub.Attend.future(message, metadata=bearer(token), timeout=PATIENCE_SECONDS)
    assert call.code() is code
    assert code is OK or (SELF in call.details()) == (code is NOT_FOUND)  # it may read all names
    stream.end()


def test_every_method_takes_an_alias_and_returns_the_name_of_the_model(secured: Secured) -> None:
    name, channel = "org/self", secured.served.channel
    options: dict[str, Any] = {"metadata": bearer("all-token"), "timeout": PATIENCE_SECONDS}
    triton, typed = GRPCInferenceServiceStub(channel), AttentionServiceStub(channel)
    assert triton.ModelReady(oip.ModelReadyRequest(name=name), **options).ready
    assert triton.ModelMetadata(oip.ModelMetadataRequest(name=name), **options).name == SELF
    assert triton.ModelConfig(oip.ModelConfigRequest(name=name), **options).config.name == SELF
    statistics = triton.ModelStatistics(oip.ModelStatisticsRequest(name=name), **options).model_stats
    assert [model.name for model in statistics] == [SELF]
    model = typed.GetModel(pb.GetModelRequest(name=name), **options).model
    assert (model.name, [*model.aliases]) == (SELF, ["org/self", "unknown-alias"])
    assert not typed.ListContexts(pb.ListContextsRequest(model_name=name), **options).contexts
    check = StringValue(value=f"{ATTEND}{SEPARATOR}unknown-alias")
    ask: Any = channel.unary_unary(ACCESS_CHECK, StringValue.SerializeToString)
    for token, code in (("all-token", OK), ("other-token", DENIED)):
        assert ask.future(check, metadata=bearer(token)).code() is code


def test_a_reader_sees_the_models_of_its_pattern(secured: Secured) -> None:
    typed = AttentionServiceStub(secured.served.channel)
    triton = GRPCInferenceServiceStub(secured.served.channel)
    options: dict[str, Any] = {"metadata": bearer("reader-token"), "timeout": PATIENCE_SECONDS}
    listed = (
        typed.ListModels(pb.ListModelsRequest(), **options).models,
        triton.RepositoryIndex(oip.RepositoryIndexRequest(), **options).models,
        triton.ModelStatistics(oip.ModelStatisticsRequest(), **options).model_stats,
    )
    assert [[model.name for model in models] for models in listed] == [[SELF]] * 3
    assert typed.GetModel(pb.GetModelRequest(name=SELF), **options).model.name == SELF
    for method in ("ModelMetadata", "ModelConfig", "ModelReady", "ModelStatistics"):
        message = getattr(oip, f"{method}Request")(name=CROSS)
        assert refusal(getattr(triton, method).future(message, **options)) == (DENIED, "RIGHT_MISSING")
    assert refusal(typed.GetModel.future(pb.GetModelRequest(name=CROSS), **options))[0] is DENIED


def test_a_token_that_is_revoked_ends_its_streams_with_the_next_message(secured: Secured) -> None:
    channel = secured.served.channel
    stream = OpenStream(channel, "caller-token")
    assert stream.ask("7").id == "7"
    secured.revoke("caller")
    wait_until(lambda: attend(channel, caller="caller-token").code() is UNAUTHENTICATED)
    stream.send()
    assert refusal(stream.replies) == (UNAUTHENTICATED, "TOKEN_INVALID")
    stream.end()


def test_only_the_identity_at_its_limit_is_refused(self_model: LoadedModel, guard: Guard) -> None:
    with Served.held(self_model, guard=guard) as served:
        calls = [attend(served.channel, caller="limited-token")]
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        for name in ("Attend", "ListContexts", "DropContext"):
            method = ATTEND.replace("Attend", name)
            assert headers_only(served, method, bearer("limited-token")) == (EXHAUSTED, "IDENTITY_LIMIT")
        calls.append(attend(served.channel, caller="caller-token"))
        assert served.engine.has_queued(2)
        served.gate.open()
        assert [call.code() for call in calls] == [OK, OK]
        assert "IDENTITY_LIMIT" in served.calls.refusals


@pytest.mark.parametrize(
    ("others", "slots", "limit", "most"),
    [(0, 100, 0, 80), (80, 100, 0, 16), (0, 100, 3, 3), (1, 2, 0, 1), (2, 2, 0, 1)],
    ids=["alone", "beside a greedy one", "limit of its own", "few slots", "none is free"],
)
def test_an_identity_gets_its_share_of_the_slots(others: int, slots: int, limit: int, most: int) -> None:
    """A first one is always granted: the server's own limit is elsewhere."""
    for held in range(most):
        check_share("calls", held, others + held, slots, limit)
    with pytest.raises(IdentityLimitError, match=f"{most} calls of this identity are open, which is its"):
        check_share("calls", most, others + most, slots, limit)
