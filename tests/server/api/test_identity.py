"""Which identity may call which method, with which model, how often, and until when."""

import threading
from collections.abc import Callable, Iterator
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
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.peers import ACCESS_CHECK as CHECK
from attention_serving.server.transport.call import Metadata
from tests.server.api.messages import attend_request
from tests.server.api.secured import (
    ATTEND,
    DENIED,
    ENTRIES,
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
    eventually,
    signed,
    write_tokens,
)

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    ("method", "metadata", "expected"),
    [
        (ATTEND, (), (UNAUTHENTICATED, "CREDENTIALS_MISSING")),
        (STREAM, bearer("wrong"), (UNAUTHENTICATED, "TOKEN_INVALID")),
        (LOAD, bearer("old-token"), (UNAUTHENTICATED, "TOKEN_EXPIRED")),
        (ATTEND, bearer("all-token") * 2, (UNAUTHENTICATED, "TOKEN_INVALID")),
        (ATTEND, bearer("reader-token"), (DENIED, "RIGHT_MISSING")),
        (STREAM, bearer("reader-token"), (DENIED, "RIGHT_MISSING")),
        (LOAD, bearer("caller-token"), (DENIED, "RIGHT_MISSING")),
        (LOGS, bearer("caller-token"), (DENIED, "RIGHT_MISSING")),
        (REFLECTION, (), (UNAUTHENTICATED, "CREDENTIALS_MISSING")),
    ],
)
def test_a_caller_without_the_right_is_refused_before_a_message(
    secured: Secured, method: str, metadata: Metadata, expected: tuple[grpc.StatusCode, str]
) -> None:
    assert headers_only(secured.served, method, *metadata) == expected
    assert secured.served.server.load().waiting == 0
    if method != REFLECTION:  # which is not counted
        (ended,) = secured.served.calls.ended(1)
        assert ended == (method.rsplit("/", 1)[1], expected[0].name)


def test_a_message_that_is_too_large_is_not_looked_at(secured: Secured) -> None:
    stub = AttentionServiceStub(secured.served.channel)
    message = attend_request([100_000])
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(message, timeout=PATIENCE_SECONDS)
    assert raised.value.code() is UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as raised:
        stub.Attend(message, metadata=bearer("all-token"), timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("token", [lambda: "caller-token", signed], ids=["token", "web token"])
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
    stub = AttentionServiceStub(secured.served.channel)
    wrong = pb.AttendRequest(model_name=SELF, output_data_type=pb.DATA_TYPE_BOOL)
    text = denied(stub.Attend, wrong, "other-token")
    assert text == "the identity 'other' does not have the right infer for model 'tiny-self'"
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
    request = pb.AttendRequest(model_name="tiny-x")
    for token, learns in (("caller-token", False), ("all-token", True)):
        with pytest.raises(grpc.RpcError) as raised:
            stub.Attend(request, metadata=bearer(token), timeout=PATIENCE_SECONDS)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert (SELF in str(raised.value.details())) == learns


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


def test_health_is_open(secured: Secured) -> None:
    channel = secured.served.channel
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    triton = GRPCInferenceServiceStub(channel)
    assert triton.ServerLive(oip.ServerLiveRequest(), timeout=PATIENCE_SECONDS).live
    assert triton.ServerReady(oip.ServerReadyRequest(), timeout=PATIENCE_SECONDS).ready


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


class Conversation:
    """A stream whose next request the test sends when it has seen the reply to the last."""

    def __init__(self, served: Served, token: str) -> None:
        self._go = threading.Semaphore(0)
        self._ended = False
        stub = AttentionServiceStub(served.channel)
        self._replies = stub.AttendStream(self._requests(), metadata=bearer(token), timeout=PATIENCE_SECONDS)

    def _requests(self) -> Iterator[pb.AttendStreamRequest]:
        while self._go.acquire(timeout=PATIENCE_SECONDS) and not self._ended:
            yield pb.AttendStreamRequest(id="7", request=attend_request([2]))

    def ask(self) -> pb.AttendStreamResponse:
        self._go.release()
        reply: pb.AttendStreamResponse = next(self._replies)
        return reply

    def end(self) -> None:
        self._ended = True
        self._go.release()


def test_a_token_that_is_revoked_ends_its_streams_with_the_next_message(secured: Secured) -> None:
    conversation = Conversation(secured.served, "caller-token")
    assert conversation.ask().id == "7"
    write_tokens(secured.file, *(known for known in ENTRIES if known["name"] != "caller"))
    stub = AttentionServiceStub(secured.served.channel)

    def is_revoked() -> bool:
        try:
            stub.Attend(attend_request([2]), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return error.code() is UNAUTHENTICATED
        return False

    assert eventually(is_revoked)
    with pytest.raises(grpc.RpcError) as raised:
        conversation.ask()
    conversation.end()
    assert (raised.value.code(), from_rpc_error(raised.value).reason) == (UNAUTHENTICATED, "TOKEN_INVALID")


def test_an_identity_at_its_limit_is_refused_and_others_are_not(
    self_model: LoadedModel, guard: Guard
) -> None:
    with Served.held(self_model, guard=guard) as served:
        stub = AttentionServiceStub(served.channel)

        def start(token: str) -> Any:
            return stub.Attend.future(attend_request([2]), metadata=bearer(token), timeout=PATIENCE_SECONDS)

        held = start("limited-token")
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        assert headers_only(served, ATTEND, *bearer("limited-token")) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "IDENTITY_LIMIT",
        )
        other = start("caller-token")
        assert served.engine.has_queued(2)
        served.gate.open()
        assert [len(call.result().context_vectors.lengths) for call in (held, other)] == [1, 1]
        assert ("Attend", "IDENTITY_LIMIT") in served.calls.refusals
