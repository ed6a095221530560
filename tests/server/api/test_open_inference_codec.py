"""The codec of the Open Inference Protocol: rectangular messages, ragged requests, and what is refused."""

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference.codec import decode
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.api.messages import answered, decode_infer, raw_request, read_infer, text_request
from tests.server.samples import CROSS, HEADS, SELF, TEXT, WIDTHS, eager_module
from tests.support import eager
from tests.support.coroutines import submitted

rng = np.random.default_rng(0)


def rectangles(model: LoadedModel, batch: int, query_length: int, key_length: int) -> dict[str, Array]:
    """Random inputs of a model, (B, T, width)."""
    return {
        spec.name: rng.standard_normal(
            (batch, query_length if spec.name == "query" else key_length, WIDTHS[spec.name]), np.float32
        )
        for spec in model.inputs
    }


def answer(model: LoadedModel, message: pb.ModelInferRequest) -> dict[str, Array]:
    """Decodes a request, computes it and encodes the result."""
    request, reply = decode_infer(message, model)
    engine = Engine(Repository([model]))
    result = submitted(engine, model, request).result()
    response = pb.ModelInferResponse.FromString(b"".join(reply.parts(result)))
    engine.close()
    assert (response.model_name, response.model_version) == (model.name, "1")
    return answered(response)


key_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(lengths=key_lengths, kind=st.sampled_from([None, *MaskKind]), one_head=st.booleans())
@settings(max_examples=20)
def test_key_lengths_remove_padding_and_outputs_are_padded_with_zeros(
    cross_model: LoadedModel, lengths: list[int], kind: MaskKind | None, *, one_head: bool
) -> None:
    batch, query_length, key_length = len(lengths), 3, 6
    tensors = rectangles(cross_model, batch, query_length, key_length)
    mask = rng.random((batch, HEADS, query_length, key_length)) < 0.6
    if kind is not None:
        spans = {MaskKind.KEYS: mask[:, 0, 0], MaskKind.PAIRS: mask[:, 0], MaskKind.HEADS: mask}
        tensors["attention_mask"] = mask[:, :1] if one_head else spans[kind]
    message = raw_request(
        cross_model, {**tensors, "key_lengths": np.array(lengths)}, ["attention_weights", "context_vectors"]
    )
    outputs = answer(cross_model, message)
    assert list(outputs) == ["attention_weights", "context_vectors"]
    assert outputs["attention_weights"].shape == (batch, HEADS, query_length, key_length)
    for index, length in enumerate(lengths):
        inputs = [tensors["query"][index], tensors["key"][index, :length], tensors["value"][index, :length]]
        given_mask = tensors["attention_mask"][index, ..., :length] if kind is not None else None
        if given_mask is not None and given_mask.ndim < 3:
            given_mask = given_mask.reshape(1, -1, length)
        context, weights = eager.attend(eager_module(CROSS), *inputs, mask=given_mask)
        eager.assert_parity(outputs["context_vectors"][index], context)
        eager.assert_parity(outputs["attention_weights"][index][..., :length], weights)
        assert not outputs["attention_weights"][index][..., length:].any()


@given(lengths=key_lengths)
@settings(max_examples=10)
def test_key_lengths_of_self_attention_also_shorten_the_query(
    self_model: LoadedModel, lengths: list[int]
) -> None:
    tensors = rectangles(self_model, len(lengths), 6, 6)
    tensors["query"][:, max(lengths) :] = np.nan
    mask = rng.random((len(lengths), 6, 6)) < 0.6
    tensors |= {"attention_mask": mask, "key_lengths": np.array(lengths, np.int32)}
    context = answer(self_model, raw_request(self_model, tensors))["context_vectors"]
    assert context.shape == (len(lengths), 6, 4)
    for index, length in enumerate(lengths):
        rows = tensors["query"][index, :length]
        expected, _ = eager.attend(eager_module(SELF), rows, mask=mask[index : index + 1, :length, :length])
        eager.assert_parity(context[index, :length], expected)
        assert not context[index, length:].any()


def test_outputs_of_texts_include_their_lengths(text_model: LoadedModel) -> None:
    outputs = answer(text_model, text_request(text_model, [b"Life is short", b"eat"]))
    assert list(outputs) == ["context_vectors", "lengths"]
    assert outputs["lengths"].tolist() == [3, 1]
    assert outputs["context_vectors"].shape == (2, 3, 16)
    assert outputs["context_vectors"][1, 0].any()
    assert not outputs["context_vectors"][1, 1:].any()


@pytest.mark.parametrize(
    ("microseconds", "seconds"),
    [(2_000_000, 2.0), (0, math.inf), (-1, math.inf), (2**63 - 1, math.inf)],
    ids=["two", "zero", "negative", "longest"],
)
def test_the_timeout_parameter_is_a_deadline(
    self_model: LoadedModel, microseconds: int, seconds: float
) -> None:
    message = raw_request(self_model, rectangles(self_model, 1, 2, 2))
    message.parameters["timeout"].int64_param = microseconds
    before = time.monotonic()
    deadline = decode_infer(message, self_model)[0].deadline
    assert before + seconds <= deadline <= time.monotonic() + seconds
    assert decode_infer(message, self_model, before)[0].deadline == before


def test_weights_are_computed_only_on_request(self_model: LoadedModel) -> None:
    tensors = rectangles(self_model, 1, 2, 2)
    plain, _ = decode_infer(raw_request(self_model, tensors), self_model)
    weights, _ = decode_infer(raw_request(self_model, tensors, ["attention_weights"]), self_model)
    assert (plain.return_weights, weights.return_weights) == (False, True)


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


# With the field that is at fault, and a part of what is said of it.
REFUSALS: dict[str, tuple[str, Message, str]] = {
    "unknown input": (SELF, tensors(key=KEY), "key: model 'tiny-self' takes query"),
    "axes": (SELF, tensors(query=QUERY[0]), "query: has 2 axes; the model takes 3"),
    "lengths as floats": (
        SELF,
        lengths(1, 2, dtype="f4"),
        "key_lengths: must be integers, one for each of 2 sequences",
    ),
    "length of zero": (CROSS, lengths(0, 5), "key_lengths: must lie in 1..5"),
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
    "mask of other bytes": (
        SELF,
        tensors(attention_mask=np.full((2, 3), 2, np.uint8).view(np.bool_)),
        "attention_mask: contains the byte 2; a boolean must be 0 or 1",
    ),
    "mask of one axis": (SELF, mask(3), "attention_mask: is bool (3,); must be bool"),
    "mask of pairs": (
        CROSS,
        mask(2, 5, 3),
        "attention_mask: must be bool (2, 5), (2, 3, 5), (2, 1, 3, 5) or",
    ),
    "mask of heads": (CROSS, mask(2, 3, 3, 5), "attention_mask: or (2, 2, 3, 5)"),
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


LATER: dict[str, tuple[str, Message]] = {
    "no width": (SELF, tensors(query=QUERY[:, :, :0])),
    "no sequences, with lengths": (SELF, tensors(query=QUERY[:0], key_lengths=np.zeros(0, np.int64))),
    "key shorter than its lengths": (CROSS, tensors(key=KEY[:, :2], key_lengths=np.array([3, 3]))),
    "mask of another batch than the texts": (
        TEXT,
        text(b"Life", b"is short", attention_mask=np.ones((1, 3), np.bool_)),
    ),
}


@pytest.mark.parametrize(("name", "build"), LATER.values(), ids=LATER)
def test_what_does_not_fit_is_refused_when_it_is_validated_at_the_latest(
    models: dict[str, LoadedModel], name: str, build: Message
) -> None:
    with pytest.raises(InvalidRequestError):
        validate(decode_infer(build(models[name]), models[name])[0], models[name], Limits())
