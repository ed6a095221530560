"""FP16 and BF16 on the wire: what eager PyTorch computes in fp32 from the same rounded numbers, rounded."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch
from attention_client import AttendInputs, AttentionClient
from attention_client.errors import InvalidArgumentError

from attention_serving.model.presets import build_preset
from attention_serving.protos.attention.v1 import attention_pb2 as attention_pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripts.local_server import ServerProcess
from tests.support.eager import Array, attend

SELF, CROSS, WIDTH, HEADS = "multi-head-64x4", "cross-768x12", 64, 4
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# One unit in the last place, relative, and what rounding adds near zero.
LAST_PLACE = {"fp16": 2**-10, "bf16": 2**-7}
NEAR_ZERO = 1e-5
FP32_RTOL, FP32_ATOL = 1e-4, 1e-5
InputTensor = pb.ModelInferRequest.InferInputTensor
RequestedOutput = pb.ModelInferRequest.InferRequestedOutputTensor


@pytest.fixture(params=HALVES)
def wire(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def half_client(server: ServerProcess, wire: str) -> Iterator[AttentionClient]:
    with AttentionClient(server.target, wire=wire) as client:  # type: ignore[arg-type]  # one of the literals
        yield client


@pytest.fixture
def typed(server: ServerProcess) -> Iterator[AttentionServiceStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield AttentionServiceStub(channel)


@pytest.fixture
def open_inference(server: ServerProcess) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield GRPCInferenceServiceStub(channel)


def queries(*lengths: int, width: int = WIDTH) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, width), dtype=np.float32) for length in lengths]


def rounded(array: Array, wire: str) -> Array:
    """The numbers that the type of the wire has for those of an array."""
    found: Array = torch.from_numpy(array).to(HALVES[wire]).float().numpy()
    return found


def bits(array: Array, wire: str) -> bytes:
    data: bytes = torch.from_numpy(array).to(HALVES[wire]).view(torch.uint16).numpy().tobytes()
    return data


def values(data: bytes, wire: str) -> Array:
    found: Array = torch.from_numpy(np.frombuffer(data, "<u2").copy()).view(HALVES[wire]).float().numpy()
    return found


def assert_rounded(found: Array, eager: Array, wire: str) -> None:
    """`found` is `eager` in the type of the wire, up to one unit in the last place."""
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rounded(found, wire))
    np.testing.assert_allclose(found, eager, rtol=LAST_PLACE[wire], atol=NEAR_ZERO)


def typed_request(query: Array, wire: str, output: int = 0) -> attention_pb.AttendRequest:
    """A request with a query in the type of the wire, and a type for the output."""
    vectors = attention_pb.VectorSequences(
        data_type=attention_pb.DataType.Value(f"DATA_TYPE_{wire.upper()}"),
        width=query.shape[1],
        lengths=[len(query)],
        data=bits(query, wire),
    )
    return attention_pb.AttendRequest(
        model_name=SELF,
        query=vectors,
        output_data_type=output,  # type: ignore[arg-type]  # may be none of the enum
    )


def open_request(batch: Array, datatype: str, data: bytes, output: str) -> pb.ModelInferRequest:
    """A request for two outputs, of which only the context vectors have a type."""
    parameters = {"datatype": pb.InferParameter(string_param=output)}
    return pb.ModelInferRequest(
        model_name=SELF,
        inputs=[InputTensor(name="query", datatype=datatype, shape=batch.shape)],
        outputs=[
            RequestedOutput(name="context_vectors", parameters=parameters),
            RequestedOutput(name="attention_weights"),
        ],
        raw_input_contents=[data],
    )


def test_results_and_weights_of_a_list(half_client: AttentionClient, wire: str) -> None:
    inputs = queries(7, 1, 130)
    result = half_client.attend(SELF, inputs, return_weights=True)
    assert result.attention_weights is not None
    for query, context, weights in zip(inputs, result.context_vectors, result.attention_weights, strict=True):
        eager_context, eager_weights = attend(build_preset(SELF), rounded(query, wire))
        assert_rounded(context, eager_context, wire)
        assert_rounded(weights, eager_weights, wire)


def test_cross_attention_on_a_stream(half_client: AttentionClient, wire: str) -> None:
    module = build_preset(CROSS)
    config = module.config
    (query,), (key,) = queries(5, width=config.d_query), queries(9, width=config.d_key)
    (value,) = queries(9, width=config.d_value)
    (result,) = half_client.attend_stream(CROSS, [AttendInputs(query, key, value)])
    eager, _ = attend(module, *(rounded(array, wire) for array in (query, key, value)))
    assert_rounded(result.context_vectors, eager, wire)


def test_messages_have_half_the_bytes(typed: AttentionServiceStub, wire: str) -> None:
    (query,) = queries(128)
    data_type = attention_pb.DataType.Value(f"DATA_TYPE_{wire.upper()}")
    request = typed_request(query, wire, data_type)
    response = typed.Attend(request, timeout=60)
    assert response.context_vectors.data_type == data_type
    assert max(request.ByteSize(), response.ByteSize()) < query.nbytes // 2 + 100


def test_each_answer_has_the_type_that_was_asked_for(typed: AttentionServiceStub, wire: str) -> None:
    (query,) = queries(6)
    response = typed.Attend(typed_request(query, wire), timeout=60)
    assert response.context_vectors.data_type == attention_pb.DATA_TYPE_FP32
    found = np.frombuffer(response.context_vectors.data, "<f4").reshape(query.shape)
    eager, _ = attend(build_preset(SELF), rounded(query, wire))
    np.testing.assert_allclose(found, eager, rtol=FP32_RTOL, atol=FP32_ATOL)


def test_open_inference_inputs_and_outputs(open_inference: GRPCInferenceServiceStub, wire: str) -> None:
    batch = np.stack(queries(6, 6))
    request = open_request(batch, wire.upper(), bits(batch, wire), wire.upper())
    response = open_inference.ModelInfer(request, timeout=60)
    assert [output.datatype for output in response.outputs] == [wire.upper(), "FP32"]
    context = values(response.raw_output_contents[0], wire).reshape(batch.shape)
    weights = np.frombuffer(response.raw_output_contents[1], "<f4").reshape(2, HEADS, 6, 6)
    for at, query in enumerate(batch):
        eager_context, eager_weights = attend(build_preset(SELF), rounded(query, wire))
        assert_rounded(context[at], eager_context, wire)
        np.testing.assert_allclose(weights[at], eager_weights, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize("data_type", [attention_pb.DATA_TYPE_INT64, 99], ids=["int64", "unknown"])
def test_another_output_type_is_refused(typed: AttentionServiceStub, data_type: int) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        typed.Attend(typed_request(queries(2)[0], "fp16", data_type), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output_data_type: is" in str(caught.value.details())


@pytest.mark.parametrize("datatype", ["INT8", "fp16", ""])
def test_another_output_datatype_is_refused(open_inference: GRPCInferenceServiceStub, datatype: str) -> None:
    batch = np.stack(queries(2))
    with pytest.raises(grpc.RpcError) as caught:
        open_inference.ModelInfer(open_request(batch, "FP32", batch.tobytes(), datatype), timeout=60)
    assert "parameters[datatype]: must be one of FP32, FP16, BF16" in str(caught.value.details())


def test_a_number_beyond_fp16_is_refused_before_it_is_sent(server: ServerProcess) -> None:
    with (
        AttentionClient(server.target, wire="fp16") as client,
        pytest.raises(InvalidArgumentError, match="65504 in magnitude"),
    ):
        client.attend(SELF, np.full((1, WIDTH), 1e5, np.float32))


def test_an_unknown_wire_type_is_refused(server: ServerProcess) -> None:
    with pytest.raises(InvalidArgumentError, match="wire"):
        AttentionClient(server.target, wire="fp8")  # type: ignore[arg-type]
