"""Requests of attention.v1 that name their inputs: what is refused, and what a stream answers."""

import math
from typing import Any

import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.api.attention.named_tensors import decode
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import attend_request, read_attend
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.support.eager import Array
from tests.support.mutations import named

LIMITS = Limits(max_sequences=4)
QUERY = np.ones((3, 4), np.float32)


def tensors(*arrays: Array, **fields: Any) -> pb.NamedTensors:
    """The query, with other values in some fields."""
    message = named("query", *(arrays or (QUERY,)))
    message.MergeFrom(pb.NamedTensors(**fields))
    return message


def request(*inputs: pb.NamedTensors, **options: Any) -> pb.AttendRequest:
    return pb.AttendRequest(inputs=inputs, **options)


REFUSED = {
    "twice": (request(tensors(), tensors()), "query: is sent twice"),
    "type": (request(tensors(data_type=99)), "query.data_type: is 99; must be one of FP32"),
    "none": (
        request(pb.NamedTensors(name="query", data_type=pb.DATA_TYPE_FP32)),
        "query: contains 0 tensors",
    ),
    "sizes": (request(tensors(shapes=[4], num_tensors=2)), "query: has 3 sizes for 2 tensors"),
    "axes": (request(tensors(shapes=[1] * 40)), "query: has 42 sizes for 1 tensors"),
    "bytes": (request(tensors(data=b"1234567")), "query.data: has 7 bytes; 12 elements"),
    "elements": (
        request(tensors(np.ones((0, 4), np.float32), shapes=[2**32 - 1] * 2)),
        "query: tensor 0 has an axis without elements",
    ),
    "several batches": (request(tensors(*np.ones((2, 2, 1, 4), np.float32))), "a tensor of 3 axes"),
    "weights": (request(tensors(), return_weights=True), "return_weights: cannot be combined with inputs"),
    "query": (request(tensors(), query=attend_request([2]).query), "query: cannot be combined with inputs"),
}
TOO_LARGE = {
    "many": (request(tensors(num_tensors=2**32 - 1)), "contains 4294967295 sequences"),
    "large batch": (request(tensors(np.ones((5, 1, 4), np.float32))), "query: contains 5 sequences"),
}


@pytest.mark.parametrize(
    ("message", "says", "kind"),
    [
        *[(*row, InvalidRequestError) for row in REFUSED.values()],
        *[(*row, LimitExceededError) for row in TOO_LARGE.values()],
    ],
    ids=[*REFUSED, *TOO_LARGE],
)
def test_a_message_that_contradicts_itself_or_is_too_large_is_refused(
    self_model: LoadedModel, message: pb.AttendRequest, says: str, kind: type[EngineError]
) -> None:
    parsed = read_attend(message.SerializeToString(), LIMITS)
    with pytest.raises(kind) as caught:
        decode(parsed, self_model, math.inf, Allowance(LIMITS))
    assert says in caught.value.message


def test_a_stream_answers_by_name_as_a_call_does(self_model: LoadedModel) -> None:
    bad, good = (
        pb.AttendRequest(model_name=self_model.name, inputs=[named(name, QUERY)], output_names=names)
        for name, names in (("key", []), ("query", ["attention_weights", "context_vectors"]))
    )
    with Served(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        answer = stub.Attend(good, timeout=PATIENCE_SECONDS)
        items = [pb.AttendStreamRequest(id=id_, request=each) for id_, each in (("a", bad), ("b", good))]
        refused, streamed = stub.AttendStream(iter(items), timeout=PATIENCE_SECONDS)
    assert (refused.id, refused.error.field) == ("a", "key")
    assert (streamed.id, streamed.response) == ("b", answer)
    assert [(each.name, list(each.shapes)) for each in answer.outputs] == [
        ("attention_weights", [2, 3, 3]),
        ("context_vectors", [3, 4]),
    ]
    assert not answer.HasField("context_vectors")
