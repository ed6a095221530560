"""Hostile and unlucky requests: each is refused with an error that reaches its caller."""

import dataclasses
import math
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from pydantic import ValidationError

from attention_serving.protos.attention.v1 import attention_pb2 as typed_pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.application import rpc_options
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.tokenizer import (
    UNLIMITED,
    EncodedTexts,
    TextEncoder,
    TextLimits,
)
from attention_serving.server.engine.types import Text
from attention_serving.server.errors import BindError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings import Settings
from attention_serving.server.transport import TransportKind
from attention_serving.server.transport.options import RpcOptions
from tests.server.api.messages import answered, raw_request
from tests.server.samples import SELF, TEXT

MAX_RESULT_BYTES = 16_384
OPTIONS = RpcOptions(
    host="127.0.0.1",
    port=0,
    max_message_bytes=1 << 20,
    max_concurrent_calls=8,
    max_streams=2,
    stream_window=4,
)
QUERY = np.ones((1, 2, 4), np.float32)


class BrokenEncoder(TextEncoder):
    """A tokenizer that raises an unexpected error for one text."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._sound = encoder

    def encode(
        self,
        texts: tuple[Text, ...],
        limits: TextLimits = UNLIMITED,
        deadline: float = math.inf,
        *,
        prefix: str = "",
        truncates: bool = False,
        offsets: bool = False,
    ) -> EncodedTexts:
        if b"is" in texts:
            raise ValueError("a secret")
        return self._sound.encode(
            texts, limits, deadline, prefix=prefix, truncates=truncates, offsets=offsets
        )


@pytest.fixture(scope="module")
def channel(self_model: LoadedModel, text_model: LoadedModel) -> Iterator[grpc.Channel]:
    assert text_model.text_encoder is not None
    broken = dataclasses.replace(text_model, text_encoder=BrokenEncoder(text_model.text_encoder))
    engine = Engine(Repository([self_model, broken]), Limits(max_result_bytes=MAX_RESULT_BYTES))
    server = RpcServer(OPTIONS, Metrics())
    port = server.bind()
    server.start(engine)
    with grpc.insecure_channel(f"{OPTIONS.host}:{port}") as channel:
        yield channel
    assert server.stop(10)
    engine.close()


@pytest.fixture(scope="module")
def typed(channel: grpc.Channel) -> AttentionServiceStub:
    return AttentionServiceStub(channel)


@pytest.fixture(scope="module")
def open_inference(channel: grpc.Channel) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(channel)


def refused(call: "grpc.UnaryUnaryMultiCallable", message: object) -> grpc.RpcError:  # type: ignore[type-arg]
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=30)
    return caught.value


def of_texts(*texts: str) -> typed_pb.AttendRequest:
    return typed_pb.AttendRequest(model_name=TEXT, text=typed_pb.TextSequences(texts=texts))


def test_an_unexpected_error_is_internal_and_reveals_no_details(typed: AttentionServiceStub) -> None:
    error = refused(typed.Attend, of_texts("is"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert len(typed.Attend(of_texts("Life"), timeout=30).context_vectors.lengths) == 1


def test_an_unexpected_error_takes_its_place_in_a_stream(typed: AttentionServiceStub) -> None:
    requests = [
        typed_pb.AttendStreamRequest(id=text, request=of_texts(text)) for text in ("Life", "is", "short")
    ]
    answers = list(typed.AttendStream(iter(requests), timeout=30))
    assert [answer.id for answer in answers] == ["Life", "is", "short"]
    assert [answer.WhichOneof("result") for answer in answers] == ["response", "error", "response"]
    assert answers[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in answers[1].error.message


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (of_texts(" ".join(f"word{number}" for number in range(5000))), grpc.StatusCode.INVALID_ARGUMENT),
        (typed_pb.AttendRequest(model_name="m" * 50_000), grpc.StatusCode.NOT_FOUND),
    ],
    ids=["unknown words", "model name"],
)
def test_a_refusal_reaches_the_caller_even_if_the_request_is_very_long(
    typed: AttentionServiceStub, message: typed_pb.AttendRequest, code: grpc.StatusCode
) -> None:
    assert refused(typed.Attend, message).code() is code


def test_the_longest_timeout_means_no_timeout(
    open_inference: GRPCInferenceServiceStub, self_model: LoadedModel
) -> None:
    message = raw_request(self_model, {"query": QUERY})
    message.parameters["timeout"].int64_param = 2**63 - 1
    # The call has no deadline, so that the parameter's applies.
    assert answered(open_inference.ModelInfer(message))["context_vectors"].shape == QUERY.shape


def test_a_port_in_use_is_refused() -> None:
    first = RpcServer(OPTIONS, Metrics())
    port = first.bind()
    second = RpcServer(dataclasses.replace(OPTIONS, port=port), Metrics())
    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}"):
        second.bind()
    second.stop(0)
    first.stop(0)


@pytest.mark.parametrize(
    ("name", "max_batch_size", "inputs"),
    [
        # The batch axis is not part of the shape, unless there is no other.
        (SELF, Limits().max_sequences, [("query", pb.TYPE_FP32, [-1, 4])]),
        (TEXT, 0, [("text", pb.TYPE_STRING, [-1])]),
    ],
    ids=["vectors", "text"],
)
def test_a_configuration_names_the_tensors_of_a_model(
    open_inference: GRPCInferenceServiceStub,
    name: str,
    max_batch_size: int,
    inputs: list[tuple[str, int, list[int]]],
) -> None:
    config = open_inference.ModelConfig(pb.ModelConfigRequest(name=name), timeout=30).config
    assert (config.name, config.max_batch_size) == (name, max_batch_size)
    assert config.HasField("dynamic_batching") == (max_batch_size > 0)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input] == inputs
    assert config.output[0].name == "context_vectors"


@pytest.mark.parametrize("kind", TransportKind)
def test_every_transport_is_a_setting(kind: TransportKind) -> None:
    settings = Settings.model_validate({"model_repository": "anywhere", "transport": kind.value})
    assert rpc_options(settings).transport is kind


def test_another_transport_is_refused_with_the_choices() -> None:
    with pytest.raises(ValidationError, match="'completion-queue' or 'threaded'"):
        Settings.model_validate({"model_repository": "anywhere", "transport": "other"})
