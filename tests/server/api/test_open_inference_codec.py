"""The codec of the Open Inference Protocol: tensors, rectangular messages, ragged requests, and refusals."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference.requests import BYTES, CONTENTS
from attention_serving.server.api.tensors import DTYPE_BY_NAME, Allowance
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.types import Array, MaskKind, Result
from tests.server.api.messages import (
    Output,
    answered,
    decode_infer,
    decode_inputs,
    packed,
    raw_request,
    rectangles,
    text_request,
)
from tests.server.samples import CROSS, HEADS, SELF, TEXT, eager_module
from tests.support import eager
from tests.support.coroutines import submitted
from tests.support.refusals import expect_refusal

rng = np.random.default_rng(0)


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


def test_outputs_are_sent_in_the_type_that_the_module_returns(self_model: LoadedModel) -> None:
    numbers = rng.standard_normal((2, 4))
    _, reply = decode_infer(raw_request(self_model, rectangles(self_model, 1, 2, 2)), self_model)
    parts = reply.parts(Result({"context_vectors": [numbers]}))
    response = pb.ModelInferResponse.FromString(b"".join(parts))
    assert (response.outputs[0].datatype, response.raw_output_contents[0]) == ("FP64", numbers.tobytes())


@pytest.mark.parametrize(("microseconds", "seconds"), [(2_000_000, 2.0), (0, math.inf), (10**18, math.inf)])
def test_the_timeout_is_a_deadline(self_model: LoadedModel, microseconds: int, seconds: float) -> None:
    message = raw_request(self_model, rectangles(self_model, 1, 2, 2))
    message.parameters["timeout"].int64_param = microseconds
    before = time.monotonic()
    deadline = decode_infer(message, self_model)[0].deadline
    assert before + seconds <= deadline <= time.monotonic() + seconds
    assert decode_infer(message, self_model, before)[0].deadline == before


shapes = array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
named_tensors = st.sampled_from(sorted(DTYPE_BY_NAME)).flatmap(
    lambda name: st.tuples(st.just(name), arrays(DTYPE_BY_NAME[name], shapes))
)


Build = Callable[[LoadedModel], pb.ModelInferRequest]


def message_of(datatype: str, shape: Sequence[int], *data: bytes, **contents: Any) -> pb.ModelInferRequest:
    """A request with one input, in raw contents or in typed fields."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="query", datatype=datatype, shape=shape)
    if contents:
        tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return pb.ModelInferRequest(inputs=[tensor], raw_input_contents=data)


def sent(*arguments: Any, **contents: Any) -> Build:
    return lambda _: message_of(*arguments, **contents)


@given(tensor=named_tensors)
def test_typed_elements_become_the_array(tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    message = message_of(datatype, array.shape, **{CONTENTS[datatype]: array.ravel().tolist()})
    found = decode_inputs(message)["query"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == DTYPE_BY_NAME[datatype]


@given(elements=st.lists(st.binary(max_size=9), min_size=1, max_size=6), as_raw=st.booleans())
def test_elements_of_type_bytes_are_decoded(elements: list[bytes], *, as_raw: bool) -> None:
    shape = [len(elements), 1]
    by_raw, contents = message_of(BYTES, shape, packed(elements)), {"bytes_contents": elements}
    found = decode_inputs(by_raw if as_raw else message_of(BYTES, shape, **contents))["query"]
    assert found.shape == (len(elements), 1)
    assert found.ravel().tolist() == elements


QUERY = np.zeros((2, 3, 4), np.float32)
KEY, VALUE = np.zeros((2, 5, 6), np.float32), np.zeros((2, 5, 5), np.float32)


def tensors(**changes: Array) -> Build:
    """A valid request to the model, with changes."""
    good = {"query": QUERY, "key": KEY, "value": VALUE}
    return lambda model: raw_request(model, {spec.name: good[spec.name] for spec in model.inputs} | changes)


def lengths(*of_each: int, dtype: str = "i8") -> Build:
    return tensors(key_lengths=np.array(of_each, dtype))


def mask(*shape: int, dtype: str = "?") -> Build:
    return tensors(attention_mask=np.ones(shape, dtype))


def of(**inputs: Array) -> Build:
    """A request with these inputs only."""
    return lambda model: raw_request(model, inputs)


def outputs(*names: str) -> Build:
    return lambda model: raw_request(model, {"query": QUERY}, names)


def text(*texts: bytes, **others: Array) -> Build:
    return lambda model: text_request(model, texts, **others)


def changed(change: Callable[[pb.ModelInferRequest], object]) -> Build:
    """A valid request with a change."""

    def build(model: LoadedModel) -> pb.ModelInferRequest:
        message = tensors()(model)
        change(message)
        return message

    return build


def with_parameter(name: str, **value: Any) -> Build:
    """A request with a parameter of its own."""
    return changed(lambda message: message.parameters[name].CopyFrom(pb.InferParameter(**value)))


def with_output(name: str, **value: Any) -> Build:
    """A request for an output that has a parameter."""
    output = Output(name="context_vectors", parameters={name: pb.InferParameter(**value)})
    return changed(lambda message: message.outputs.append(output))


OUT = "outputs[context_vectors]"
# The model, a message, and the beginning of what is said of it, which names the field at fault.
INVALID: tuple[tuple[str, Build, str], ...] = (
    (SELF, sent("FP32", [2, 3], bytes(23)), "query: has 23 bytes; 2 x 3 elements of float32 need 24 bytes"),
    (SELF, sent("BOOL", [3], b"\1\2\0"), "query: contains the byte 2; a boolean must be 0 or 1"),
    (SELF, sent("BF16", [2, 3], bytes(13)), "query: has 13 bytes; 2 x 3 elements of bfloat16 need 12 bytes"),
    (SELF, sent("FP8", [1], b"1"), "query: datatype 'FP8' is unknown; must be one of BOOL, INT8"),
    (SELF, sent("FP32", [-1, -1], bytes(4)), "query: has shape [-1, -1]; every size must be 1 or more"),
    (SELF, sent("FP32", [1], bytes(4), fp32_contents=[1.0]), "query: has contents, but the request has"),
    (CROSS, changed(lambda m: m.raw_input_contents.pop()), "raw_input_contents: has no entry for input"),
    (CROSS, changed(lambda m: m.raw_input_contents.append(b"")), "raw_input_contents: has 4 entries"),
    (CROSS, changed(lambda m: setattr(m.inputs[1], "name", "query")), "query: is sent twice"),
    (SELF, sent("FP32", [2, 2], fp32_contents=[1]), "query: has 1 elements; its shape is [2, 2]"),
    (SELF, sent("FP32", [1], fp64_contents=[1]), "query: is FP32 and fills fp64_contents; must fill"),
    (SELF, sent("FP16", [1], fp32_contents=[1]), "query: FP16 must be sent in raw_input_contents"),
    (SELF, sent("UINT16", [1], uint_contents=[65536]), "query: contains 65536; UINT16 takes 0 to 65535"),
    (SELF, sent("INT8", [1], int_contents=[-129]), "query: contains -129; INT8 takes -128 to 127"),
    (SELF, sent(BYTES, [2], packed([b"a"] * 3)), "query: has more than 2 elements; its shape is [2]"),
    (SELF, sent(BYTES, [2], packed([b"ab"]) + b"\1\0"), "query: the element at byte 6 extends beyond the"),
    (SELF, sent(BYTES, [1], packed([b"a"])), "query: is BYTES; the model takes float32"),
    (SELF, tensors(key=KEY), "key: is not an input; model 'tiny-self' takes query"),
    (SELF, tensors(query=QUERY[0]), "query: has 2 axes; the model takes 3"),
    (CROSS, tensors(value=VALUE[:, 1:]), "value: has key_length 4; it must be 5, as in another input"),
    (SELF, changed(lambda m: m.inputs.extend([m.inputs[0]] * 7)), "inputs: has 8 entries; the model takes 7"),
    (SELF, lengths(1, 2, dtype="f4"), "key_lengths: must be integers, one for each of 2 sequences"),
    (CROSS, lengths(0, 5), "key_lengths: must lie in 1..5"),
    (TEXT, text(b"Life", key_lengths=np.array([1])), "key_lengths: cannot be combined with text; send"),
    (TEXT, of(text=np.zeros(2, np.int64)), "text: must be a BYTES tensor with at least one element"),
    (SELF, mask(2, 3, dtype="i4"), "attention_mask: is int32 (2, 3); must be bool (2, 3), (2"),
    (CROSS, mask(2, 5, 3), "attention_mask: is bool (2, 5, 3); must be bool (2, 5), (2, 3, 5),"),
    (SELF, outputs("context_vectors", "logits"), "outputs[logits]: is unknown; must be one of"),
    (SELF, outputs("embedding"), "outputs[embedding]: model 'tiny-self' is not a text encoder; its outputs"),
    (SELF, outputs("context_vectors", "context_vectors"), f"{OUT}: is requested twice; each output must"),
    (SELF, with_output("classification", int64_param=3), f"{OUT}.parameters[classification]: is not"),
    (SELF, with_output("datatype", string_param="INT8"), f"{OUT}.parameters[datatype]: must be one of"),
    (SELF, with_parameter("sequence_id", int64_param=7), "parameters[sequence_id]: is not supported by"),
    (SELF, with_parameter("timeout", string_param="soon"), "timeout: must be an integer: microseconds"),
    (SELF, with_parameter("dimensions", int64_param=0), "dimensions: model 'tiny-self' is not a text"),
    (SELF, with_parameter("dimensions", string_param="8"), "dimensions: must be a positive integer"),
    (SELF, with_parameter("truncate", string_param="yes"), "truncate: must be a boolean"),
)


MANY_NUMBERS = sent("INT64", [1, 40_000], int64_contents=[1] * 40_000)
# The same, and what is limited.
LIMITED: tuple[tuple[str, Build, str, Limits], ...] = (
    (SELF, sent("FP32", [4097, 1, 4], b""), "query: contains 4097 sequences; the limit is 4096", Limits()),
    (SELF, lengths(1, 3), "query: the response would have 97 bytes with", Limits(max_result_bytes=90)),
    (TEXT, text(b"Life", b"is", b"short"), "text: contains 3 sequences; the limit", Limits(max_sequences=2)),
    (SELF, MANY_NUMBERS, "query: would have 320000 bytes decoded", Limits(max_input_bytes=319_999)),
)
REFUSED: tuple[tuple[Any, ...], ...] = (*INVALID, *LIMITED)


@pytest.mark.parametrize("row", REFUSED, ids=[row[2] for row in REFUSED])
def test_a_wrong_request_is_refused(models: dict[str, LoadedModel], row: Any) -> None:
    (name, build, message, *limits), budget = row, MemoryBudget(10**6)
    allowance = Allowance(limits[0] if limits else Limits(), Reservation(budget))
    with expect_refusal(message, LimitExceededError if limits else InvalidRequestError):
        decode_infer(build(models[name]), models[name], allowance=allowance)
    assert not limits or budget.held_bytes == 0  # what is too large is not made


def test_the_padding_of_a_response_is_reserved_before_the_run(self_model: LoadedModel) -> None:
    budget = MemoryBudget(1000)
    decode_infer(lengths(1, 3)(self_model), self_model, allowance=Allowance(Limits(), Reservation(budget)))
    assert budget.held_bytes == 96 + 96  # the rectangle, and the serialized response
