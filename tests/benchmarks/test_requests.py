"""What is sent: lengths, sequences, padding, arrivals, and the bytes of each protocol."""

import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2
from benchmarks.compute import pad
from benchmarks.load import poisson
from benchmarks.wire import Api, decode, encode
from benchmarks.workload import AttentionKind, Lengths, Model, sequences

CROSS, SELF = (Model(kind, 64, 4) for kind in (AttentionKind.CROSS, AttentionKind.SELF))
MIXED = Lengths(512, mixed=True)


def test_mixed_lengths_are_lognormal_and_reproducible() -> None:
    lengths = MIXED.draw(64)
    assert lengths == MIXED.draw(64)
    assert lengths != sorted(lengths)
    assert min(lengths) == 1
    assert 400 < max(lengths) <= 512
    assert 45 < np.mean(lengths) < 60
    assert Lengths(6).draw(3) == [6, 6, 6]


def test_a_key_is_as_long_as_the_next_query_and_padding_is_zero() -> None:
    found, lengths = sequences(CROSS, MIXED), MIXED.draw(64)
    assert [len(query) for query, _ in found] == lengths
    assert [len(key) for _, key in found] == [*lengths[1:], lengths[0]]
    batch = pad(CROSS, found[:8])
    assert batch.key_lengths is not None
    assert (batch.sequences, batch.tokens) == (8, sum(lengths[:8]))
    for row, (_, key), length in zip(batch.inputs["key"], found[:8], batch.key_lengths, strict=True):
        assert np.array_equal(row[:length], key)
        assert not row[length:].any()


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    due = poisson(1000, 20, seed=3)
    assert np.array_equal(due, poisson(1000, 20, seed=3))
    assert len(due) == 20_000
    assert 0 <= due[0] <= due[-1] < 20e9
    # Exponential gaps have a standard deviation equal to their mean.
    assert np.isclose(np.diff(due).std(), 1e6, rtol=0.05)
    with pytest.raises(ValueError, match="must be positive"):
        poisson(0, 1, seed=0)


def test_requests_hold_the_sequences_without_padding() -> None:
    group = sequences(CROSS, MIXED)[:3]
    request = attention_pb2.AttendRequest.FromString(encode(Api.ATTENTION, CROSS, group))
    assert request.model_name == CROSS.name
    for at, message in enumerate((request.query, request.key)):
        assert list(message.lengths) == [len(sequence[at]) for sequence in group]
        assert message.data == b"".join(sequence[at].tobytes() for sequence in group)
    item = attention_pb2.AttendStreamRequest.FromString(encode(Api.ATTENTION_STREAM, CROSS, group))
    assert item.request == request
    data = encode(Api.OPEN_INFERENCE, CROSS, group[:1])
    assert encode(Api.ECHO, CROSS, group[:1]) == data
    infer = open_inference_pb2.ModelInferRequest.FromString(data)
    assert [one.name for one in infer.inputs] == ["query", "key"]
    assert [tuple(one.shape) for one in infer.inputs] == [(1, *array.shape) for array in group[0]]
    assert list(infer.raw_input_contents) == [array.tobytes() for array in group[0]]


def test_responses_of_every_api_are_decoded() -> None:
    rows = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
    vectors = attention_pb2.VectorSequences(width=64, lengths=[2, 3], data=rows.tobytes())
    answer = attention_pb2.AttendResponse(context_vectors=vectors)
    infer = open_inference_pb2.ModelInferResponse(raw_output_contents=[rows.tobytes()])
    infer.outputs.add(name="context_vectors", datatype="FP32", shape=(1, 5, 64))
    for api, message, parts in (
        (Api.ATTENTION, answer, [rows[:2], rows[2:]]),
        (Api.ATTENTION_STREAM, attention_pb2.AttendStreamResponse(response=answer), [rows[:2], rows[2:]]),
        (Api.OPEN_INFERENCE, infer, [rows]),
    ):
        for found, part in zip(decode(api, message.SerializeToString(), SELF), parts, strict=True):
            assert np.array_equal(found, part), api
    error = attention_pb2.StreamError(reason="LIMIT_EXCEEDED", message="too long")
    failed = attention_pb2.AttendStreamResponse(error=error).SerializeToString()
    with pytest.raises(ValueError, match="LIMIT_EXCEEDED: too long"):
        decode(Api.ATTENTION_STREAM, failed, SELF)
