"""Encoders of every family through a live server, against the transformers library."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    InvalidArgumentError,
    LimitExceededError,
    TextTruncatedWarning,
)
from numpy.testing import assert_allclose

from scripts.local_server import ServerProcess
from tests.encoders.repository import DIMENSIONS, INT8, SENTENCE, SHORT, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, cosines, expected_of, library_model, token_ids
from tests.support import encoders


@pytest.mark.parametrize("name", encoders.CASES)
def test_embeddings_of_a_mixed_batch_equal_the_library(encoder_client: AttentionClient, name: str) -> None:
    with ThreadPoolExecutor(4) as pool:  # several requests share the server's batches
        calls = [pool.submit(encoder_client.embed, name, TEXTS[index:]) for index in range(4)]
        found = [call.result() for call in calls]
    expected = np.stack([expected_of(name, text).embedding.numpy() for text in TEXTS])
    for index, embeddings in enumerate(found):
        assert_allclose(embeddings, expected[index:], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", encoders.CASES)
def test_token_vectors_and_the_weights_of_every_layer_equal_the_library(
    encoder_client: AttentionClient, name: str
) -> None:
    result = encoder_client.attend_text(name, list(TEXTS), return_weights=True)
    assert result.attention_weights is not None
    for text, vectors, weights in zip(TEXTS, result.context_vectors, result.attention_weights, strict=True):
        expected = expected_of(name, text)
        assert_allclose(vectors, expected.tokens.numpy(), rtol=RTOL, atol=ATOL)
        assert_allclose(weights, expected.weights.numpy(), rtol=RTOL, atol=ATOL)
    alone = encoder_client.attend_text(name, list(TEXTS))
    assert alone.attention_weights is None
    for vectors, same in zip(alone.context_vectors, result.context_vectors, strict=True):
        assert_allclose(vectors, same, rtol=RTOL, atol=ATOL)


def test_every_output_by_name(encoder_client: AttentionClient) -> None:
    ids = {"token_ids": [encoders.random_ids("bert", length) for length in (3, 9)]}
    assert list(encoder_client.infer("bert", ids).outputs) == ["embedding"]
    names = ["attention_weights", "embedding", "context_vectors"]
    found = encoder_client.infer("bert", ids, outputs=names).outputs
    assert list(found) == names
    for index, sequence in enumerate(ids["token_ids"]):
        expected = encoders.expected("bert", library_model("bert"), sequence)
        for name, own in zip(names, (expected.weights, expected.embedding, expected.tokens), strict=True):
            assert_allclose(found[name][index], own.numpy(), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "clip_text_model"])
def test_token_ids_up_to_the_largest_length(encoder_client: AttentionClient, name: str) -> None:
    most = encoders.CASES[name].max_tokens
    sequences = [encoders.random_ids(name, length) for length in (1, 2, 7, 128, most)]
    found = encoder_client.embed(name, sequences)
    for ids, embedding in zip(sequences, found, strict=True):
        expected = encoders.expected(name, library_model(name), ids)
        assert_allclose(embedding, expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    with pytest.raises(LimitExceededError, match=f"takes at most {most}"):
        encoder_client.embed(name, encoders.random_ids(name, most + 1))


def test_the_form_of_the_answer_follows_the_input(encoder_client: AttentionClient) -> None:
    one = encoder_client.embed(SENTENCE, TEXTS[0])
    ids = token_ids("bert", TEXTS[0])
    assert one.shape == (encoders.WIDTH,)
    assert encoder_client.embed(SENTENCE, [TEXTS[0]]).shape == (1, encoders.WIDTH)
    assert_allclose(encoder_client.embed(SENTENCE, ids), one, rtol=RTOL, atol=ATOL)
    assert_allclose(encoder_client.embed(SENTENCE, np.array([ids, ids]))[1], one, rtol=RTOL, atol=ATOL)
    assert_allclose(np.linalg.norm(one), 1, rtol=1e-5)


def test_more_texts_than_one_request_takes(encoder_client: AttentionClient) -> None:
    texts = [f"{index % 50} times dessert" for index in range(10_000)]
    found = encoder_client.embed(SENTENCE, texts)
    assert found.shape == (10_000, encoders.WIDTH)
    for index in (0, 49, 1023, 1024, 9_999):
        expected = expected_of("bert", texts[index], normalised=True)
        assert_allclose(found[index], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)


def test_a_prompt_is_put_before_each_text(encoder_client: AttentionClient) -> None:
    with_prompt = encoder_client.embed(SENTENCE, list(TEXTS), prompt="query")
    written = encoder_client.embed(SENTENCE, [f"query: {text}" for text in TEXTS])
    assert_allclose(with_prompt, written, rtol=RTOL, atol=ATOL)
    plain = encoder_client.embed(SENTENCE, list(TEXTS))
    assert_allclose(
        encoder_client.embed(SENTENCE, list(TEXTS), prompt="document"), plain, rtol=RTOL, atol=ATOL
    )
    assert np.abs(plain - written).max() > 0.01
    with pytest.raises(InvalidArgumentError, match="prompt: is 'answer'; must be one of query, document"):
        encoder_client.embed(SENTENCE, "a", prompt="answer")
    with pytest.raises(InvalidArgumentError, match="model 'bert' has no prompts"):
        encoder_client.embed("bert", "a", prompt="query")
    with pytest.raises(InvalidArgumentError, match="prompt"):
        encoder_client.embed(SENTENCE, [5, 6], prompt="query")


def test_a_default_prompt_holds_unless_the_request_names_another(encoder_client: AttentionClient) -> None:
    found = encoder_client.embed(TRUNCATING, "a")
    assert_allclose(found, encoder_client.embed(SENTENCE, "query: a"), rtol=RTOL, atol=ATOL)
    none = encoder_client.embed(TRUNCATING, "a", prompt="")
    assert_allclose(none, encoder_client.embed(SENTENCE, "a"), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dimensions", [*DIMENSIONS, encoders.WIDTH])
def test_shortened_embeddings_are_normalised_again(encoder_client: AttentionClient, dimensions: int) -> None:
    whole = encoder_client.embed(SENTENCE, list(TEXTS))
    found = encoder_client.embed(SENTENCE, list(TEXTS), dimensions=dimensions)
    cut = whole[:, :dimensions]
    assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_dimensions_that_the_model_does_not_list_are_refused(encoder_client: AttentionClient) -> None:
    with pytest.raises(InvalidArgumentError, match="dimensions: is 9; model 'sentence' allows 8, 16, 32"):
        encoder_client.embed(SENTENCE, "a", dimensions=9)
    with pytest.raises(InvalidArgumentError, match="allows 32"):
        encoder_client.embed("bert", "a", dimensions=8)


def test_a_long_text_is_refused_unless_it_may_be_cut(encoder_client: AttentionClient) -> None:
    text = "dessert " * 200
    with pytest.raises(LimitExceededError, match=f"text 1 has .* tokens; the limit is {encoders.POSITIONS}"):
        encoder_client.embed(SENTENCE, ["a", text])
    ids = encoders.tokenizer_of("bert").encode(text).ids
    kept = [*ids[: encoders.POSITIONS - 1], ids[-1]]  # the end token stays
    expected = encoders.expected("bert", library_model("bert"), kept, normalised=True)
    found = encoder_client.embed(SENTENCE, ["a", text], truncate=True)
    assert_allclose(found[1], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    assert_allclose(found[0], encoder_client.embed(SENTENCE, "a"), rtol=RTOL, atol=ATOL)


def test_a_model_that_cuts_says_so(encoder_client: AttentionClient) -> None:
    with pytest.warns(TextTruncatedWarning, match="cut 1 texts"):
        found = encoder_client.embed(TRUNCATING, ["a", "a longer text"], prompt="")
    ids = token_ids("bert", "a longer text")
    expected = encoders.expected("bert", library_model("bert"), [*ids[: SHORT - 1], ids[-1]], normalised=True)
    assert_allclose(found[1], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    with pytest.raises(LimitExceededError):
        encoder_client.embed(TRUNCATING, "a longer text", truncate=False)


def test_int8_embeddings_point_where_fp32_ones_do(encoder_client: AttentionClient) -> None:
    found, exact = (encoder_client.embed(name, list(TEXTS)) for name in (INT8, SENTENCE))
    assert cosines(found, exact).min() > 0.99
    assert np.abs(found - exact).max() > 1e-5


def test_a_model_that_is_not_an_encoder_field_is_refused(encoder_client: AttentionClient) -> None:
    with pytest.raises(InvalidArgumentError, match="does not take a mask"):
        encoder_client.attend_text(SENTENCE, "ab", mask=np.ones(4, bool))


def test_the_asynchronous_client_computes_the_same(
    encoder_server: ServerProcess, encoder_client: AttentionClient
) -> None:
    async def embed() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        async with AsyncAttentionClient(encoder_server.target) as client:
            found, other = await asyncio.gather(
                client.embed(SENTENCE, list(TEXTS), prompt="query", dimensions=8),
                client.embed(SENTENCE, TEXTS[0]),
            )
            assert other.shape == (encoders.WIDTH,)
            return found

    expected = encoder_client.embed(SENTENCE, list(TEXTS), prompt="query", dimensions=8)
    assert_allclose(asyncio.run(embed()), expected, rtol=RTOL, atol=ATOL)


def test_the_model_describes_its_encoder(encoder_client: AttentionClient) -> None:
    model = encoder_client.model(SENTENCE)
    assert model.text_encoder is not None
    assert model.text_encoder.prompts == ("query", "document")
    assert model.text_encoder.dimensions == DIMENSIONS
    assert (model.text_encoder.num_layers, model.text_encoder.embedding_width) == (3, encoders.WIDTH)
    assert model.text_encoder.normalised
    outputs = {tensor.name: tensor for tensor in model.outputs}
    assert not outputs["embedding"].optional
    assert outputs["attention_weights"].axes == ("batch", 3, 4, "query_length", "query_length")
