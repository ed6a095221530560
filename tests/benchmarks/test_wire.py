import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2
from benchmarks.wire import Api, decode, encode
from benchmarks.workload import AttentionKind, Lengths, Model, sequences

CROSS = Model(AttentionKind.CROSS, 64, 4)
SELF = Model(AttentionKind.SELF, 64, 4)
MIXED = Lengths(512, mixed=True)


def test_many_sequences_are_concatenated_without_padding() -> None:
    group = sequences(CROSS, MIXED)[:3]
    request = attention_pb2.AttendRequest.FromString(encode(Api.ATTENTION, CROSS, group))

    assert request.model_name == CROSS.name
    for at, message in enumerate((request.query, request.key)):
        assert list(message.lengths) == [len(sequence[at]) for sequence in group]
        assert message.data == b"".join(sequence[at].tobytes() for sequence in group)
    assert not request.HasField("value")


def test_a_stream_wraps_the_same_request() -> None:
    group = sequences(SELF, MIXED)[:1]
    item = attention_pb2.AttendStreamRequest.FromString(encode(Api.ATTENTION_STREAM, SELF, group))

    assert item.request.SerializeToString() == encode(Api.ATTENTION, SELF, group)


@pytest.mark.parametrize("api", [Api.OPEN_INFERENCE, Api.ECHO])
def test_the_echo_receives_the_bytes_of_the_open_inference_protocol(api: Api) -> None:
    sequence = sequences(CROSS, MIXED)[0]
    request = open_inference_pb2.ModelInferRequest.FromString(encode(api, CROSS, [sequence]))

    assert [one.name for one in request.inputs] == ["query", "key"]
    assert [tuple(one.shape) for one in request.inputs] == [(1, *array.shape) for array in sequence]
    assert list(request.raw_input_contents) == [array.tobytes() for array in sequence]


def test_responses_of_every_api_are_decoded() -> None:
    rows = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
    vectors = attention_pb2.VectorSequences(width=64, lengths=[2, 3], data=rows.tobytes())
    answer = attention_pb2.AttendResponse(context_vectors=vectors)
    infer = open_inference_pb2.ModelInferResponse(raw_output_contents=[rows.tobytes()])
    infer.outputs.add(name="context_vectors", datatype="FP32", shape=(1, 5, 64))
    streamed = attention_pb2.AttendStreamResponse(response=answer)

    for api, message, parts in (
        (Api.ATTENTION, answer.SerializeToString(), [rows[:2], rows[2:]]),
        (Api.ATTENTION_STREAM, streamed.SerializeToString(), [rows[:2], rows[2:]]),
        (Api.OPEN_INFERENCE, infer.SerializeToString(), [rows]),
    ):
        for found, part in zip(decode(api, message, SELF), parts, strict=True):
            assert np.array_equal(found, part), api


def test_an_error_on_a_stream_is_raised() -> None:
    error = attention_pb2.StreamError(reason="LIMIT_EXCEEDED", message="too long")
    with pytest.raises(ValueError, match="LIMIT_EXCEEDED: too long"):
        decode(
            Api.ATTENTION_STREAM, attention_pb2.AttendStreamResponse(error=error).SerializeToString(), SELF
        )
