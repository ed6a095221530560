"""Who may call which method: each refusal has its code and reason, before the message is received."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from attention_client.errors import from_rpc_error
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as oip
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.http.exchange import access_question as question
from attention_serving.server.security.peers import ACCESS_CHECK as CHECK
from attention_serving.server.transport.call import Metadata
from tests.server.api.messages import attend_request
from tests.server.api.secured import (
    ATTEND,
    DENIED,
    LOAD,
    LOGS,
    STREAM,
    UNAUTHENTICATED,
    Secured,
    bearer,
    headers_only,
)
from tests.server.samples import CROSS, SELF
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import (
    signed,
    signed_with_the_public_key,
    unsigned,
)


@pytest.mark.parametrize("method", [ATTEND, STREAM, LOAD], ids=["unary", "stream", "admin"])
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "CREDENTIALS_MISSING"),
        (bearer("wrong"), "TOKEN_INVALID"),
        (bearer("old-token"), "TOKEN_EXPIRED"),
        (bearer("all-token") * 2, "TOKEN_INVALID"),
        ((("authorization", "Basic YWxsOnRva2Vu"),), "TOKEN_INVALID"),
        (bearer("x" * 5000), "TOKEN_INVALID"),
    ],
    ids=["none", "wrong", "expired", "several", "another scheme", "long"],
)
def test_an_unknown_caller_is_refused_before_a_message(
    secured: Secured, method: str, metadata: Metadata, reason: str
) -> None:
    assert headers_only(secured.served, method, *metadata) == (UNAUTHENTICATED, reason)
    assert secured.served.server.load().waiting == 0


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (unsigned, "TOKEN_INVALID"),
        (signed_with_the_public_key, "TOKEN_INVALID"),
        (lambda: signed(aud="other"), "TOKEN_INVALID"),
        (lambda: signed(iss="https://other.example"), "TOKEN_INVALID"),
        (lambda: signed(key="two"), "TOKEN_INVALID"),
        (lambda: signed(key="two", kid="one"), "TOKEN_INVALID"),
        (lambda: signed(exp=1), "TOKEN_EXPIRED"),
    ],
    ids=[
        "alg none",
        "HS256 by the public key",
        "audience",
        "issuer",
        "unknown key",
        "another key",
        "expired",
    ],
)
def test_a_wrong_web_token_is_refused_before_a_message(secured: Secured, token: Any, reason: str) -> None:
    assert headers_only(secured.served, ATTEND, *bearer(token())) == (UNAUTHENTICATED, reason)


def test_a_header_beyond_the_core_s_limit_is_refused(secured: Secured) -> None:
    code, _ = headers_only(secured.served, ATTEND, *bearer("x" * 20_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("token", "method"),
    [("reader-token", ATTEND), ("caller-token", LOAD), ("caller-token", LOGS), ("reader-token", STREAM)],
)
def test_a_caller_without_the_right_is_denied_before_a_message(
    secured: Secured, token: str, method: str
) -> None:
    assert headers_only(secured.served, method, *bearer(token)) == (DENIED, "RIGHT_MISSING")


def test_a_message_that_is_too_large_is_not_looked_at(secured: Secured) -> None:
    stub = AttentionServiceStub(secured.served.channel)
    message = attend_request([100_000])
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(message, timeout=PATIENCE_SECONDS)
    assert raised.value.code() is UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(message, metadata=bearer("all-token"), timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "token", [lambda: "caller-token", lambda: "all-token", signed], ids=["caller", "all", "web token"]
)
def test_a_known_caller_is_answered(secured: Secured, token: Callable[[], str]) -> None:
    stub = AttentionServiceStub(secured.served.channel)
    answer = stub.Attend(attend_request([2]), metadata=bearer(token()), timeout=PATIENCE_SECONDS)
    assert list(answer.context_vectors.lengths) == [2]


def denied(call: Any, message: Any, token: str) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call(message, metadata=bearer(token), timeout=PATIENCE_SECONDS)
    assert raised.value.code() is DENIED
    assert from_rpc_error(raised.value).reason == "RIGHT_MISSING"
    return str(raised.value.details())


def test_a_model_of_others_is_denied_before_anything_else_of_the_message(secured: Secured) -> None:
    stub, triton = (
        AttentionServiceStub(secured.served.channel),
        GRPCInferenceServiceStub(secured.served.channel),
    )
    wrong = pb.AttendRequest(model_name=SELF, output_data_type=pb.DATA_TYPE_BOOL)
    text = denied(stub.Attend, wrong, "other-token")
    assert text == "the identity 'other' does not have the right infer for model 'tiny-self'"
    denied(triton.ModelInfer, oip.ModelInferRequest(model_name=SELF), "other-token")
    # Whether a model exists is not told to those who may not use it.
    denied(stub.Attend, pb.AttendRequest(model_name="absent"), "other-token")


def test_a_model_of_others_in_a_stream_is_an_error_of_its_request(secured: Secured) -> None:
    messages = [
        pb.AttendStreamRequest(id="1", request=pb.AttendRequest(model_name="absent")),
        pb.AttendStreamRequest(id="2", request=attend_request([2])),
    ]
    stub = AttentionServiceStub(secured.served.channel)
    stream = stub.AttendStream(iter(messages), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS)
    first, second = stream
    assert (first.error.code, first.error.reason) == (DENIED.value[0], "RIGHT_MISSING")
    assert list(second.response.context_vectors.lengths) == [2]


def test_who_may_not_read_learns_no_names_of_models(secured: Secured) -> None:
    stub = AttentionServiceStub(secured.served.channel)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(
            pb.AttendRequest(model_name="tiny-x"), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS
        )
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert SELF not in str(raised.value.details())
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(
            pb.AttendRequest(model_name="tiny-x"), metadata=bearer("all-token"), timeout=PATIENCE_SECONDS
        )
    assert SELF in str(raised.value.details())


def test_a_reader_sees_the_models_of_its_pattern(secured: Secured) -> None:
    stub, triton = (
        AttentionServiceStub(secured.served.channel),
        GRPCInferenceServiceStub(secured.served.channel),
    )
    options: dict[str, Any] = {"metadata": bearer("reader-token"), "timeout": PATIENCE_SECONDS}
    assert [model.name for model in stub.ListModels(pb.ListModelsRequest(), **options).models] == [SELF]
    assert [
        model.name for model in triton.RepositoryIndex(oip.RepositoryIndexRequest(), **options).models
    ] == [SELF]
    statistics = triton.ModelStatistics(oip.ModelStatisticsRequest(), **options)
    assert [model.name for model in statistics.model_stats] == [SELF]
    assert stub.GetModel(pb.GetModelRequest(name=SELF), **options).model.name == SELF
    for call, message in (
        (stub.GetModel, pb.GetModelRequest(name=CROSS)),
        (triton.ModelMetadata, oip.ModelMetadataRequest(name=CROSS)),
        (triton.ModelConfig, oip.ModelConfigRequest(name=CROSS)),
        (triton.ModelReady, oip.ModelReadyRequest(name=CROSS)),
        (triton.ModelStatistics, oip.ModelStatisticsRequest(name=CROSS)),
    ):
        denied(call, message, "reader-token")


def test_an_administrator_changes_the_server(secured: Secured) -> None:
    triton = GRPCInferenceServiceStub(secured.served.channel)
    options: dict[str, Any] = {"metadata": bearer("all-token"), "timeout": PATIENCE_SECONDS}
    assert triton.LogSettings(oip.LogSettingsRequest(), **options).settings
    denied(triton.LogSettings, oip.LogSettingsRequest(), "caller-token")
    denied(triton.SystemSharedMemoryStatus, oip.SystemSharedMemoryStatusRequest(), "reader-token")


def test_health_is_open_and_reflection_is_not(secured: Secured) -> None:
    channel = secured.served.channel
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    triton = GRPCInferenceServiceStub(channel)
    assert triton.ServerLive(oip.ServerLiveRequest(), timeout=PATIENCE_SECONDS).live
    assert triton.ServerReady(oip.ServerReadyRequest(), timeout=PATIENCE_SECONDS).ready
    name = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert headers_only(secured.served, name) == (UNAUTHENTICATED, "CREDENTIALS_MISSING")


def test_refusals_are_counted_by_reason(secured: Secured) -> None:
    headers_only(secured.served, ATTEND)
    headers_only(secured.served, ATTEND, *bearer("wrong"))
    headers_only(secured.served, LOAD, *bearer("caller-token"))
    assert secured.served.calls.ended(3) == {
        ("Attend", "UNAUTHENTICATED"): 2,
        ("RepositoryModelLoad", "PERMISSION_DENIED"): 1,
    }
    assert sorted(secured.served.calls.refusals) == [
        ("Attend", "CREDENTIALS_MISSING"),
        ("Attend", "TOKEN_INVALID"),
        ("RepositoryModelLoad", "RIGHT_MISSING"),
    ]


@pytest.mark.parametrize(
    ("token", "method", "model", "code"),
    [
        ("caller-token", ATTEND, SELF, grpc.StatusCode.OK),
        ("caller-token", ATTEND, "", grpc.StatusCode.OK),
        ("caller-token", ATTEND, "absent", DENIED),
        ("caller-token", LOAD, "", DENIED),
        ("all-token", LOAD, SELF, grpc.StatusCode.OK),
        (None, ATTEND, SELF, UNAUTHENTICATED),
        ("all-token", "/other.Service/Method", "", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_the_question_of_the_http_process_is_answered_as_the_method_would_be(
    secured: Secured, token: str | None, method: str, model: str, code: grpc.StatusCode
) -> None:
    call: Any = secured.served.channel.unary_unary(CHECK)
    answer = call.future(question(method, model), metadata=bearer(token), timeout=PATIENCE_SECONDS)
    assert answer.code() is code


def test_without_identities_everyone_may_do_everything(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        answer = stub.Attend(attend_request([2]), metadata=bearer("any"), timeout=PATIENCE_SECONDS)
        assert list(answer.context_vectors.lengths) == [2]
        call: Any = served.channel.unary_unary(CHECK)
        assert call(question(ATTEND, SELF), timeout=PATIENCE_SECONDS) == b""
