"""The codec of the Open Inference Protocol: rectangular messages, ragged requests."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.api.messages import answered, decode_infer, raw_request, text_request
from tests.server.samples import CROSS, HEADS, SELF, WIDTHS, eager_module
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


@given(
    batch=st.integers(1, 4),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    name=st.sampled_from([SELF, CROSS]),
)
@settings(deadline=None)
def test_without_lengths_every_row_is_used(
    models: dict[str, LoadedModel], batch: int, lengths: tuple[int, int], name: str
) -> None:
    tensors = rectangles(models[name], batch, *lengths)
    request, _ = decode_infer(raw_request(models[name], dict(reversed(tensors.items()))), models[name])
    for spec in models[name].inputs:
        found, tensor = request.inputs[spec.name], tensors[spec.name]
        np.testing.assert_array_equal(found.rows, tensor.reshape(-1, tensor.shape[2]))
        assert list(found.lengths) == [tensor.shape[1]] * batch
        assert not found.rows.flags.owndata
        assert not found.rows.flags.writeable


key_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(lengths=key_lengths, kind=st.sampled_from([None, *MaskKind]), one_head=st.booleans())
@settings(deadline=None, max_examples=40)
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
@settings(deadline=None, max_examples=20)
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
    [(2_000_000, 2.0), (0, math.inf), (-1, math.inf)],
    ids=["two", "zero", "negative"],
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
