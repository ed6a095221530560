"""Requests of the Open Inference Protocol that are refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference.codec import decode
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array
from tests.server.api.messages import decode_infer, raw_request, read_infer, text_request
from tests.server.samples import CROSS, SELF, TEXT

Message = Callable[[LoadedModel], pb.ModelInferRequest]
QUERY = np.zeros((2, 3, 4), np.float32)
KEY, VALUE = np.zeros((2, 5, 6), np.float32), np.zeros((2, 5, 5), np.float32)


def tensors(**changes: Array) -> Message:
    """A valid request to the model, with changes."""

    def build(model: LoadedModel) -> pb.ModelInferRequest:
        good = {"query": QUERY} if model.name == SELF else {"query": QUERY, "key": KEY, "value": VALUE}
        return raw_request(model, {**good, **changes})

    return build


def lengths(*of_each: int, dtype: str = "i8") -> Message:
    return tensors(key_lengths=np.array(of_each, dtype))


def mask(*shape: int, dtype: str = "?") -> Message:
    return tensors(attention_mask=np.ones(shape, dtype))


def outputs(*names: str) -> Message:
    return lambda model: raw_request(model, {"query": QUERY}, names)


def shared_output(model: LoadedModel) -> pb.ModelInferRequest:
    message = raw_request(model, {"query": QUERY}, ["context_vectors"])
    message.outputs[0].parameters["shared_memory_region"].string_param = "region"
    return message


def classified(model: LoadedModel) -> pb.ModelInferRequest:
    message = raw_request(model, {"query": QUERY}, ["context_vectors"])
    message.outputs[0].parameters["classification"].int64_param = 3
    return message


def in_a_sequence(model: LoadedModel) -> pb.ModelInferRequest:
    message = raw_request(model, {"query": QUERY})
    message.parameters["sequence_id"].int64_param = 7
    return message


def many_inputs(model: LoadedModel) -> pb.ModelInferRequest:
    message = raw_request(model, {"query": QUERY})
    for index in range(5):
        message.inputs.add(name=f"other{index}", datatype="FP32", shape=[1])
    return message


def text(*texts: bytes, **others: Array) -> Message:
    return lambda model: text_request(model, texts, **others)


def numbers_as_text(model: LoadedModel) -> pb.ModelInferRequest:
    return raw_request(model, {"text": np.zeros(2, np.int64)})


# With the field that is at fault, and a part of what is said of it.
REFUSALS: dict[str, tuple[str, Message, str]] = {
    "unknown input": (SELF, tensors(key=KEY), "key: model 'tiny-self' takes query"),
    "axes": (SELF, tensors(query=QUERY[0]), "query: has 2 axes; the model takes 3"),
    "lengths of one too many": (
        SELF,
        lengths(1, 2, 3),
        "key_lengths: must be integers, one for each of 2 sequences",
    ),
    "lengths as floats": (
        SELF,
        lengths(1, 2, dtype="f4"),
        "key_lengths: must be integers, one for each of 2 sequences",
    ),
    "length of zero": (CROSS, lengths(0, 5), "key_lengths: must lie in 1..5"),
    "length beyond the key": (CROSS, lengths(5, 6), "key_lengths: must lie in 1..5"),
    "length beyond the query": (SELF, lengths(4, 3), "key_lengths: must lie in 1..3"),
    "lengths beside text": (
        TEXT,
        text(b"Life", key_lengths=np.array([1])),
        "key_lengths: cannot be combined with text; send token ids instead",
    ),
    "mask of numbers": (
        SELF,
        mask(2, 3, dtype="i4"),
        "attention_mask: is int32 (2, 3); must be bool (2, 3), (2",
    ),
    "mask of one axis": (SELF, mask(3), "attention_mask: is bool (3,); must be bool"),
    "mask of keys": (CROSS, mask(2, 3), "attention_mask: is bool (2, 3); must be bool (2, 5), (2"),
    "mask of pairs": (
        CROSS,
        mask(2, 5, 3),
        "attention_mask: must be bool (2, 5), (2, 3, 5), (2, 1, 3, 5) or",
    ),
    "mask of heads": (CROSS, mask(2, 3, 3, 5), "attention_mask: or (2, 2, 3, 5)"),
    "mask of another batch": (SELF, mask(1, 3), "attention_mask: is bool (1, 3); must be bool (2, 3), (2"),
    "unknown output": (
        SELF,
        outputs("context_vectors", "logits"),
        "outputs[logits]: is unknown; must be one of context_vectors, attention_weights",
    ),
    "output of text encoders": (
        SELF,
        outputs("embedding"),
        "outputs[embedding]: model 'tiny-self' is not a text encoder; its outputs are context_vectors",
    ),
    "lengths of vectors": (
        SELF,
        outputs("lengths"),
        "outputs[lengths]: is unknown; must be one of context_vectors, attention_weights",
    ),
    "output to shared memory": (
        SELF,
        shared_output,
        "outputs[context_vectors].parameters[shared_memory_byte_size]: is missing",
    ),
    "output twice": (
        SELF,
        outputs("context_vectors", "attention_weights", "context_vectors"),
        "outputs[context_vectors]: is requested twice; each output must be requested once",
    ),
    "inputs without end": (SELF, many_inputs, "inputs: has 6 entries; the model takes 5 at most"),
    "classification": (
        SELF,
        classified,
        "outputs[context_vectors].parameters[classification]: is not supported by this server; request",
    ),
    "stateful sequence": (
        SELF,
        in_a_sequence,
        "parameters[sequence_id]: is not supported by this server: its models keep no state",
    ),
    "text of numbers": (TEXT, numbers_as_text, "text: must be a BYTES tensor with at least one element"),
    "no text": (TEXT, text(), "text: has shape [0]; every size must be 1 or more"),
}


@pytest.mark.parametrize(("name", "build", "says"), REFUSALS.values(), ids=REFUSALS)
def test_a_request_that_does_not_fit_the_model_is_refused_and_names_the_field(
    models: dict[str, LoadedModel], name: str, build: Message, says: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_infer(build(models[name]), models[name])
    field, _, reason = says.partition(": ")
    assert caught.value.field == field
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "build",
    [tensors(query=QUERY[:, :, :0]), tensors(query=QUERY[:0], key_lengths=np.zeros(0, np.int64))],
    ids=["no width", "no sequences, with lengths"],
)
def test_an_empty_tensor_is_refused(self_model: LoadedModel, build: Message) -> None:
    message = build(self_model)
    with pytest.raises(InvalidRequestError):
        validate(decode_infer(message, self_model)[0], self_model, Limits())


def test_a_key_shorter_than_its_lengths_is_refused(cross_model: LoadedModel) -> None:
    message = tensors(key=KEY[:, :2], key_lengths=np.array([3, 3]))(cross_model)
    with pytest.raises(InvalidRequestError):
        validate(decode_infer(message, cross_model)[0], cross_model, Limits())


def test_a_mask_of_another_batch_than_the_texts_is_refused(text_model: LoadedModel) -> None:
    message = text(b"Life", b"is short", attention_mask=np.ones((1, 3), np.bool_))(text_model)
    with pytest.raises(InvalidRequestError):
        validate(decode_infer(message, text_model)[0], text_model, Limits())


LIMITED: dict[str, tuple[str, Message, Limits, str]] = {
    "padding": (
        SELF,
        lengths(1, 3),
        Limits(max_result_bytes=90),
        "query: the response would have 97 bytes with padding; the limit is 90",
    ),
    "weights": (
        SELF,
        outputs("attention_weights"),
        Limits(max_result_bytes=100),
        "outputs[attention_weights]: the response would have 145 bytes with padding; the limit is 100",
    ),
    "texts of different lengths": (
        TEXT,
        text(b"Life is short", b"eat"),
        Limits(max_result_bytes=300),
        "text: the response would have 401 bytes with padding; the limit is 300",
    ),
    "elements": (
        TEXT,
        text(b"Life", b"is", b"short"),
        Limits(max_sequences=2),
        "text: contains 3 sequences; the limit is 2",
    ),
}


@pytest.mark.parametrize(("name", "build", "limits", "says"), LIMITED.values(), ids=LIMITED)
def test_a_response_that_would_be_too_large_is_refused_before_the_run(
    models: dict[str, LoadedModel], name: str, build: Message, limits: Limits, says: str
) -> None:
    with pytest.raises(LimitExceededError) as caught:
        decode_infer(build(models[name]), models[name], allowance=Allowance(limits))
    assert caught.value.message == says


def test_the_padding_of_a_response_is_reserved_before_the_run(self_model: LoadedModel) -> None:
    budget = MemoryBudget(1000)
    decode_infer(lengths(1, 3)(self_model), self_model, allowance=Allowance(Limits(), budget.reserve(0)))
    assert budget.held_bytes == 96 + 96  # the rectangle, and the serialized response


def test_numbers_of_a_large_message_are_counted_before_they_are_decoded(self_model: LoadedModel) -> None:
    message = pb.ModelInferRequest(model_name=SELF)
    message.inputs.add(name="query", datatype="INT64", shape=[1, 40_000]).contents.int64_contents.extend(
        [1] * 40_000
    )
    limits, budget = Limits(max_input_bytes=319_999), MemoryBudget(10**6)
    parsed = read_infer(message.SerializeToString(), limits)
    with pytest.raises(LimitExceededError) as caught:
        decode(parsed, self_model, math.inf, Allowance(limits, budget.reserve(0)))
    assert caught.value.message == "query: would have 320000 bytes decoded; the limit is 319999"
    assert budget.held_bytes == 0


def test_an_empty_contents_message_beside_raw_contents_is_accepted(self_model: LoadedModel) -> None:
    message = raw_request(self_model, {"query": QUERY})
    message.inputs[0].contents.SetInParent()
    assert decode_infer(message, self_model)[0].inputs["query"].lengths == (3, 3)
