"""What the codec of attention.v1 refuses, of inputs in fields of their own and by name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.requests import check_first_output, map_fields_to_inputs
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import decode_attend
from tests.support.eager import Array
from tests.support.mutations import named
from tests.support.refusals import expect_refusal


def sequences(
    lengths: Sequence[int] = (2, 1), width: int = 3, data_type: "pb.DataType.ValueType" = pb.DATA_TYPE_FP32
) -> pb.VectorSequences:
    """Sequences of zeros of float32."""
    data = bytes(4 * sum(lengths) * width)
    return pb.VectorSequences(data_type=data_type, width=width, lengths=lengths, data=data)


def with_output(model: LoadedModel, *axes: str | int) -> LoadedModel:
    """The same model, with other axes of its first output in the manifest."""
    graphs = {
        kind: graph.model_copy(
            update={"outputs": (graph.outputs[0].model_copy(update={"axes": axes}), *graph.outputs[1:])}
        )
        for kind, graph in model.manifest.graphs.items()
    }
    return dataclasses.replace(model, manifest=model.manifest.model_copy(update={"graphs": graphs}))


def test_a_model_that_returns_no_vectors_is_refused_before_it_runs(self_model: LoadedModel) -> None:
    for vectors in (("batch",), ("batch", 4), ("batch", 2, 4)):
        check_first_output(with_output(self_model, *vectors))
    assert map_fields_to_inputs(self_model) == {}
    for others in (("batch", "length"), ("batch", "length", 4, 4), ("batch", "length", "other")):
        with pytest.raises(InvalidRequestError, match=r"model_name: .* send its inputs by name"):
            check_first_output(with_output(self_model, *others))


LIMITS = Limits(max_sequences=4)
QUERY = np.ones((3, 4), np.float32)
MOST = 2**32 - 1
LONGEST = pb.VectorSequences(data_type=pb.DATA_TYPE_INT64, width=MOST, lengths=[MOST] * 2, data=bytes(8))


UNTYPED = sequences(data_type=pb.DATA_TYPE_UNSPECIFIED)
TOO_SHORT = f"key.data: has 8 bytes; {2 * MOST} x {MOST} elements of int64 need {16 * MOST**2} bytes"
THREE_OF_FOUR = pb.TokenSequences(lengths=[2, 2], ids=[1, 2, 3])


def by_name(*arrays: Array, **fields: Any) -> pb.NamedTensors:
    """The query, with other values in some fields."""
    message = named("query", *(arrays or (QUERY,)))
    message.MergeFrom(pb.NamedTensors(**fields))
    return message


def inputs(*tensors: pb.NamedTensors, **options: Any) -> pb.AttendRequest:
    return pb.AttendRequest(inputs=tensors, **options)


INVALID = (
    (pb.AttendRequest(query=UNTYPED), "query.data_type: is 0; must be one of FP32, FP16, BF16, INT64, BOOL"),
    (pb.AttendRequest(query=sequences(width=0)), "query.width: must be at least 1"),
    (pb.AttendRequest(key=LONGEST), TOO_SHORT),
    (pb.AttendRequest(token_ids=THREE_OF_FOUR), "token_ids.ids: has 3 ids; the lengths sum to 4"),
    (pb.AttendRequest(positions=[1]), "positions: need a query of vectors or token ids; the request has"),
    (pb.AttendRequest(query=sequences([1]), output_names=["x"]), "output_names: needs inputs, which name"),
    (pb.AttendRequest(mask=pb.AttentionMask(bits=b"1")), "mask.kind: is 0; must be one of keys, pairs"),
    (inputs(by_name(), by_name()), "query: is sent twice"),
    (inputs(by_name(shapes=[1] * 40)), "query: has 42 sizes for 1 tensors"),
    (inputs(by_name(data=b"1234567")), "query.data: has 7 bytes; 12 elements"),
    (inputs(by_name(QUERY[:0], shapes=[MOST] * 2)), "query: tensor 0 has an axis without elements"),
    (inputs(by_name(), return_weights=True), "return_weights: cannot be combined with inputs"),
    (inputs(by_name(), output_names=["x"]), "output_names: has 'x'; must be one of context_vectors"),
    (inputs(by_name(), output_names=["context_vectors"] * 2), "output_names: has 'context_vectors' twice"),
)
TOO_LARGE = (
    (pb.AttendRequest(query=sequences([1] * 5)), "query: contains 5 sequences; the limit is 4"),
    (inputs(by_name(num_tensors=MOST)), "query: contains 4294967295 sequences"),
)


@pytest.mark.parametrize(
    ("message", "says", "kind"),
    [(*row, InvalidRequestError) for row in INVALID] + [(*row, LimitExceededError) for row in TOO_LARGE],
    ids=[says for _, says in (*INVALID, *TOO_LARGE)],
)
def test_a_wrong_message_is_refused(self_model: LoadedModel, message: Any, says: str, kind: Any) -> None:
    with expect_refusal(says, kind):
        decode_attend(message, self_model, limits=LIMITS)
