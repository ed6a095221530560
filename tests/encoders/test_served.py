"""Encoders through a live server, against the transformers library: one family, and all of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, InvalidArgumentError, LimitExceededError, TextTruncatedWarning
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from attention_serving.artifact.manifest import GraphKind, Manifest
from tests.encoders.repository import DIMENSIONS, FAMILIES, INT8, SENTENCE, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, library_model, token_ids
from tests.support import encoders

LONG = "dessert " * 200


def assert_embeddings(found: NDArray[np.float32], name: str, texts: list[str], *, normalised: bool) -> None:
    expected = [expected_of(name, text, normalised=normalised).embedding.numpy() for text in texts]
    assert_allclose(found, np.stack(expected), rtol=RTOL, atol=ATOL)


def assert_every_output(client: AttentionClient, model: str, family: str) -> None:
    """Token vectors and the weights of every layer of a mixed batch equal the library."""
    result, alone = (client.attend_text(model, list(TEXTS), return_weights=each) for each in (True, False))
    assert result.attention_weights is not None
    assert alone.attention_weights is None
    for text, vectors, weights in zip(TEXTS, result.context_vectors, result.attention_weights, strict=True):
        expected = expected_of(family, text)
        assert_allclose(vectors, expected.tokens.numpy(), rtol=RTOL, atol=ATOL)
        assert_allclose(weights, expected.weights.numpy(), rtol=RTOL, atol=ATOL)
    for vectors, same in zip(alone.context_vectors, result.context_vectors, strict=True):
        assert_allclose(vectors, same, rtol=RTOL, atol=ATOL)


def test_texts_of_a_mixed_batch_equal_the_library(sentence_client: AttentionClient) -> None:
    assert_embeddings(sentence_client.embed(SENTENCE, list(TEXTS)), "bert", list(TEXTS), normalised=True)
    assert_every_output(sentence_client, SENTENCE, "bert")
    assert_token_ids(sentence_client, SENTENCE, "bert", normalised=True)


def assert_token_ids(client: AttentionClient, model: str, family: str, *, normalised: bool) -> None:
    """Token ids of every length up to the largest equal the library; more are refused."""
    most = encoders.CASES[family].max_tokens
    sequences = [encoders.random_ids(family, length) for length in (1, 2, 7, 128, most)]
    for ids, embedding in zip(sequences, client.embed(model, sequences), strict=True):
        expected = encoders.expected(family, library_model(family), ids, normalised=normalised)
        assert_allclose(embedding, expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    with pytest.raises(LimitExceededError, match=f"takes at most {most}"):
        client.embed(model, encoders.random_ids(family, most + 1))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_the_library(encoder_client: AttentionClient, name: str) -> None:
    with ThreadPoolExecutor(4) as pool:  # several requests share the server's batches
        calls = [pool.submit(encoder_client.embed, name, TEXTS[index:]) for index in range(4)]
        found = [call.result() for call in calls]
    for index, embeddings in enumerate(found):
        assert_embeddings(embeddings, name, list(TEXTS[index:]), normalised=False)
    assert_every_output(encoder_client, name, name)
    assert_token_ids(encoder_client, name, name, normalised=False)


def test_a_prompt_is_put_before_each_text(sentence_client: AttentionClient) -> None:
    found = sentence_client.embed(SENTENCE, list(TEXTS), prompt="query")
    assert_embeddings(found, "bert", [f"query: {text}" for text in TEXTS], normalised=True)
    with pytest.raises(InvalidArgumentError, match="prompt: is 'answer'; must be one of query, document"):
        sentence_client.embed(SENTENCE, "a", prompt="answer")
    with pytest.raises(InvalidArgumentError, match="prompt"):
        sentence_client.embed(SENTENCE, [5, 6], prompt="query")


@pytest.mark.parametrize("dimensions", [*DIMENSIONS, encoders.WIDTH])
def test_shortened_embeddings_are_normalised_again(sentence_client: AttentionClient, dimensions: int) -> None:
    whole = sentence_client.embed(SENTENCE, list(TEXTS))
    found = sentence_client.embed(SENTENCE, list(TEXTS), dimensions=dimensions)
    cut = whole[:, :dimensions]
    assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidArgumentError, match="dimensions: is 9; model 'sentence' allows 8, 16, 32"):
        sentence_client.embed(SENTENCE, "a", dimensions=9)


def test_a_long_text_is_refused_unless_it_may_be_cut(sentence_client: AttentionClient) -> None:
    with pytest.raises(LimitExceededError, match=f"text 1 has .* tokens; the limit is {encoders.POSITIONS}"):
        sentence_client.embed(SENTENCE, ["a", LONG])
    ids = token_ids("bert", LONG)
    kept = [*ids[: encoders.POSITIONS - 1], ids[-1]]  # the end token stays
    expected = encoders.expected("bert", library_model("bert"), kept, normalised=True)
    found = sentence_client.embed(SENTENCE, ["a", LONG], truncate=True)
    assert_allclose(found[1], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    assert_allclose(found[0], sentence_client.embed(SENTENCE, "a"), rtol=RTOL, atol=ATOL)


@pytest.mark.thorough
def test_a_model_with_a_default_prompt_that_cuts_says_so(encoder_client: AttentionClient) -> None:
    found = encoder_client.embed(TRUNCATING, "a")
    assert_allclose(found, encoder_client.embed(SENTENCE, "query: a"), rtol=RTOL, atol=ATOL)
    with pytest.warns(TextTruncatedWarning, match="cut 1 texts"):
        encoder_client.embed(TRUNCATING, ["a", "a longer text"], prompt="")
    with pytest.raises(LimitExceededError):
        encoder_client.embed(TRUNCATING, "a longer text", truncate=False)


@pytest.mark.thorough
def test_int8_embeddings_point_where_fp32_ones_do(encoder_client: AttentionClient) -> None:
    found, exact = (encoder_client.embed(name, list(TEXTS)) for name in (INT8, SENTENCE))
    assert (found * exact).sum(axis=1).min() > 0.99  # cosines: embeddings have length 1
    assert np.abs(found - exact).max() > 1e-5


def test_the_model_describes_its_encoder(sentence_client: AttentionClient) -> None:
    model = sentence_client.model(SENTENCE)
    encoder, outputs = model.text_encoder, {tensor.name: tensor for tensor in model.outputs}
    assert encoder is not None
    assert (encoder.prompts, encoder.dimensions) == (("query", "document"), DIMENSIONS)
    assert (encoder.num_layers, encoder.embedding_width, encoder.normalised) == (3, encoders.WIDTH, True)
    assert outputs["attention_weights"].axes == ("batch", 3, 4, "query_length", "query_length")


@pytest.mark.thorough
def test_a_model_without_a_form_in_blocks_lacks_that_graph(encoder_repository: Path) -> None:
    """MPNet adds learnt biases for pairs of rows."""
    graphs = {name: Manifest.load(encoder_repository / name / "1").graphs for name in ("bert", "mpnet")}
    assert graphs["bert"].keys() - graphs["mpnet"].keys() == {GraphKind.BLOCKS}
