"""Spans: which tokens overlap them, how they are pooled, and which are refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling

from attention_serving.artifact.encoder import EncoderFacts, shorten
from attention_serving.artifact.manifest import GraphKind
from attention_serving.model.config import POOLINGS as LIBRARY_POOLINGS
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests import outputs
from attention_serving.server.engine.requests.tokenizer import EncodedTexts
from attention_serving.server.engine.types import Array, DecodedRequest, Ragged
from tests.server.samples import TEXT
from tests.support.refusals import expect_refusal

WIDTH, TOKENS = 8, 40
CUT = "is not within characters 1 to 5, to which the text is cut"


def facts(*pooling: str, normalised: bool = False) -> EncoderFacts:
    return EncoderFacts(
        family="bert",
        layers=1,
        width=WIDTH,
        embedding_width=WIDTH * len(pooling),
        row_elements=1,
        pooling=pooling,
        normalised=normalised,
    )


def token_vectors(count: int = TOKENS) -> Array:
    return np.random.default_rng(0).standard_normal((count, WIDTH), np.float32)


def ranges(most: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Spans that are not empty, in any order, which may overlap and repeat."""
    own = st.tuples(st.integers(0, most - 1), st.integers(1, most)).filter(lambda span: span[0] < span[1])
    return st.lists(own, max_size=6)


def by_torch(name: str, rows: Array, start: int, end: int) -> torch.Tensor:
    """What the model's own pooling makes of some rows alone, which is right if positions do not count."""
    given = torch.from_numpy(rows[start:end][None])
    features = {"token_embeddings": given, "attention_mask": torch.ones(1, end - start)}
    pooling = Pooling(given.shape[2], LIBRARY_POOLINGS[name])
    found: torch.Tensor = pooling(features)["sentence_embedding"][0]
    return found


def weighted_by_hand(rows: Array, start: int, end: int) -> torch.Tensor:
    weights = torch.arange(start + 1, end + 1, dtype=torch.float32)[:, None]
    return (torch.from_numpy(rows[start:end]) * weights).sum(dim=0) / weights.sum()


@pytest.mark.parametrize("name", outputs.POOLINGS)
@settings(max_examples=12)
@given(spans=ranges(TOKENS))
def test_each_span_is_pooled_as_torch_pools_its_rows(name: str, spans: list[tuple[int, int]]) -> None:
    rows = token_vectors()
    found = outputs.pool(rows, np.array(spans, np.int64).reshape(-1, 2), facts(name))
    assert found.dtype == np.float32
    assert found.shape == (len(spans), WIDTH)
    for vector, (start, end) in zip(found, spans, strict=True):
        own = weighted_by_hand if name == "weighted_mean" else lambda *given: by_torch(name, *given)
        np.testing.assert_allclose(vector, own(rows, start, end).numpy(), rtol=1e-5, atol=1e-6)


def test_several_poolings_are_concatenated() -> None:
    rows = token_vectors()
    found = outputs.pool(rows, np.array([[2, 9]]), facts("mean", "mean_sqrt_length", normalised=True))[0]
    both = torch.cat([by_torch(name, rows, 2, 9) for name in ("mean", "mean_sqrt_length")])
    np.testing.assert_allclose(found, both.numpy(), rtol=1e-5, atol=1e-6)
    unit = shorten(np.stack([found, 0 * found]), 0, normalises=True)
    np.testing.assert_allclose(unit, [F.normalize(both, dim=0).numpy(), 0 * found], rtol=1e-5, atol=1e-6)


def test_small_rows_after_large_ones_keep_their_precision() -> None:
    rows = np.concatenate([np.full((500, WIDTH), 1e4, np.float32), token_vectors(4) * 1e-3])
    found = outputs.pool(rows, np.array([[500, 504]]), facts("mean"))[0]
    np.testing.assert_allclose(found, rows[500:].mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-9)


texts = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4)


@settings(max_examples=30)
@given(data=st.data(), steps=texts)
def test_tokens_of_a_span_share_a_character_with_it(data: st.DataObject, steps: list[list[int]]) -> None:
    """Tokens may share characters, leave some out, or have none."""
    offsets, ends, spans = [], [], []
    for own in steps:
        bounds = [(at, at + step) for at, step in zip(np.cumsum([0, *own]).tolist(), own, strict=False)]
        bounds += bounds[-1:]  # two tokens of one character
        offsets.append([(0, 0), *bounds, (0, 0)])
        ends.append(sum(own) + 1)
        spans.append(data.draw(ranges(ends[-1])))
    encoded = EncodedTexts(
        Ragged(np.empty(0), ()), (), ragged(offsets, np.uint32), tuple(ends), None, (0,) * len(ends)
    )
    expected = [
        [[t for t, (a, b) in enumerate(own) if a < b and a < end and start < b] for start, end in wanted]
        for own, wanted in zip(offsets, spans, strict=True)
    ]
    if any(not tokens for own in expected for tokens in own):
        with pytest.raises(InvalidRequestError, match=r"^spans: .* does not overlap any token"):
            outputs.token_spans(ragged(spans), encoded)
        return
    found = outputs.token_spans(ragged(spans), encoded)
    assert found.rows.tolist() == [[tokens[0], tokens[-1] + 1] for own in expected for tokens in own]
    assert found.lengths == tuple(map(len, spans))


def ragged(pairs: list[list[tuple[int, int]]], dtype: Any = np.int64) -> Ragged:
    rows = np.array([pair for own in pairs for pair in own], dtype).reshape(-1, 2)
    return Ragged(rows, tuple(map(len, pairs)))


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ([[(0, 2)], [(3, 3)]], InvalidRequestError, "span 0 of text 1, (3, 3), has no characters"),
        ([[(0, 2), (5, 4)], []], InvalidRequestError, "span 1 of text 0, (5, 4), has no characters"),
        ([[(0, 11)], []], InvalidRequestError, "span 0 of text 0, (0, 11), ends beyond the 10 characters"),
        ([[], [(1, 2), (1, 6)]], LimitExceededError, f"span 1 of text 1, (1, 6), {CUT}"),
        ([[], [(0, 2)]], LimitExceededError, f"span 0 of text 1, (0, 2), {CUT}"),
        ([[(0, 1)]], InvalidRequestError, "are given for 1 texts of 2"),
        ([[(0, 1)], [], []], InvalidRequestError, "are given for 3 texts of 2"),
    ],
)
def test_spans_outside_their_text_are_refused(spans: Any, error: type[EngineError], message: str) -> None:
    with expect_refusal(f"spans: {message}", error):
        outputs.check_spans(ragged(spans), (10, 5), (0, 1), truncated=(1,))


def with_pooling(model: LoadedModel, **changes: Any) -> LoadedModel:
    """A model that states to be an encoder."""
    manifest = model.manifest
    graphs = {**manifest.graphs, GraphKind.TOKENS: manifest.graphs[GraphKind.PLAIN]}
    return dataclasses.replace(model, manifest=manifest.model_copy(update={"graphs": graphs, **changes}))


@pytest.mark.parametrize("field", [outputs.SPANS, outputs.NORMALISED])
def test_models_whose_embeddings_cannot_be_pooled_are_refused(text_model: LoadedModel, field: str) -> None:
    assert {*LIBRARY_POOLINGS} == {*outputs.POOLINGS, "own"}
    whole = DecodedRequest(normalised=False)
    request = whole if field == outputs.NORMALISED else DecodedRequest(spans=ragged([[(0, 1)]]))
    assert not outputs.is_pooled(whole, with_pooling(text_model, encoder=facts("own")))
    for pooling in outputs.POOLINGS if request is whole else outputs.SPAN_POOLINGS:
        model = with_pooling(text_model, encoder=facts(pooling, normalised=True), config={"dense": []})
        assert outputs.is_pooled(request, model)
    unpooled = "own" if request is whole else "cls"
    dense, no_tokens = {"dense": [{"d_in": WIDTH}]}, dict(text_model.manifest.graphs)
    for changes, message in (
        ({"graphs": no_tokens}, "is not a text encoder with token vectors"),
        ({"encoder": facts("mean", unpooled, normalised=True)}, f"pools by {unpooled}; "),
        ({"config": dense}, "has further layers after pooling"),
    ):
        model = with_pooling(text_model, **{"encoder": facts("mean", normalised=True), **changes})
        with expect_refusal(f"{field}: model '{TEXT}' {message}"):
            outputs.is_pooled(request, model)
