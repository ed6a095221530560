"""Encoders through a live server, against the transformers library: every output, option and family."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    EmbeddingInputs,
    HeadSelection,
    InvalidArgumentError,
    LimitExceededError,
    TextInputs,
    TextTruncatedWarning,
    TokenizedText,
)
from attention_client._commands.app import app
from attention_client._connection.streams import StreamItem
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from typer.testing import CliRunner

from scripts.local_server import ServerProcess
from tests.encoders.repository import DIMENSIONS, FAMILIES, INT8, SENTENCE, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, library_model, token_ids
from tests.support import encoders

LONG = "dessert " * 200


def assert_embeddings(found: NDArray[np.float32], name: str, texts: list[str], *, normalised: bool) -> None:
    expected = [expected_of(name, text, normalised=normalised).embedding.numpy() for text in texts]
    assert_allclose(found, np.stack(expected), rtol=RTOL, atol=ATOL)


def assert_every_output(client: AttentionClient, model: str, family: str) -> None:
    """Token vectors and the weights of every layer of a mixed batch equal the library."""
    result: Any = client.attend_text(model, list(TEXTS), return_weights=True)
    alone = client.attend_text(model, list(TEXTS))
    assert alone.attention_weights is None
    for index, text in enumerate(TEXTS):
        expected = expected_of(family, text)
        assert_allclose(result.attention_weights[index], expected.weights.numpy(), rtol=RTOL, atol=ATOL)
        for vectors in (result.context_vectors[index], alone.context_vectors[index]):
            assert_allclose(vectors, expected.tokens.numpy(), rtol=RTOL, atol=ATOL)


def test_texts_of_a_mixed_batch_equal_the_library(client: AttentionClient) -> None:
    assert_embeddings(client.embed(SENTENCE, list(TEXTS)), "bert", list(TEXTS), normalised=True)
    assert_every_output(client, SENTENCE, "bert")
    assert_token_ids(client, SENTENCE, "bert", normalised=True)


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
    parts = [TEXTS[index:] for index in range(4)]
    with ThreadPoolExecutor(4) as pool:  # several requests share the server's batches
        answers = list(pool.map(partial(encoder_client.embed, name), parts))
    for texts, embeddings in zip(parts, answers, strict=True):
        assert_embeddings(embeddings, name, list(texts), normalised=False)
    assert_every_output(encoder_client, name, name)
    assert_token_ids(encoder_client, name, name, normalised=False)


def test_a_prompt_is_put_before_each_text(client: AttentionClient) -> None:
    found = client.embed(SENTENCE, list(TEXTS), prompt="query")
    assert_embeddings(found, "bert", [f"query: {text}" for text in TEXTS], normalised=True)
    with pytest.raises(InvalidArgumentError, match="prompt: is 'answer'; must be one of query, document"):
        client.embed(SENTENCE, "a", prompt="answer")
    with pytest.raises(InvalidArgumentError, match="prompt"):
        client.embed(SENTENCE, [5, 6], prompt="query")


def test_kinds_of_inputs_and_the_side_of_a_cut(client: AttentionClient) -> None:
    found = client.embed(SENTENCE, list(TEXTS), input_kind="query")
    assert_array_equal(found, client.embed(SENTENCE, list(TEXTS), prompt="query"))
    text, most = "Life " + LONG, encoders.POSITIONS
    found = client.embed(SENTENCE, text, truncate=True, truncation_side="left", input_kind="query")
    ids = token_ids("bert", f"query: {text}")
    cut = [ids[0], *ids[-most + 1 :]]
    expected = encoders.expected("bert", library_model("bert"), cut, normalised=True)
    assert_allclose(found, expected.embedding.numpy(), rtol=RTOL, atol=ATOL)
    with pytest.raises(LimitExceededError, match="is not within characters"):
        client.embed(SENTENCE, text, truncate=True, truncation_side="left", spans=[(0, 4)])
    wrong: Any = "middle"
    for option in ("input_kind", "truncation_side"):
        with pytest.raises(InvalidArgumentError, match=f"{option}: expected one of"):
            client.embed(SENTENCE, "a", **{option: wrong})


def test_a_client_reads_the_tokens_of_texts(server: ServerProcess, client: AttentionClient) -> None:
    texts = ["人生 eat", "a"]
    tokenized = client.tokenize(SENTENCE, texts, input_kind="query")
    for text, each in zip(texts, tokenized, strict=True):
        expected = encoders.tokenizer_of("bert").encode(f"query: {text}")
        assert (each.ids.tolist(), len(each.tokens)) == (expected.ids, len(expected.ids))
        assert each.special.tolist() == [True, *[False] * (len(expected.ids) - 2), True]
        assert text[slice(*each.offsets[-2])] == text[-1]

    async def ask() -> TokenizedText:
        async with AsyncAttentionClient(server.target) as own:
            result: TokenizedText = await own.tokenize(SENTENCE, "a", omit_special_tokens=True)
            return result

    found = asyncio.run(ask())
    assert (found.tokens, found.offsets.tolist(), found.special.tolist()) == (("a",), [[0, 1]], [False])


@pytest.mark.parametrize("dimensions", [*DIMENSIONS, encoders.WIDTH])
def test_shortened_embeddings_are_normalised_again(client: AttentionClient, dimensions: int) -> None:
    whole = client.embed(SENTENCE, list(TEXTS))
    found = client.embed(SENTENCE, list(TEXTS), dimensions=dimensions)
    cut = whole[:, :dimensions]
    assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidArgumentError, match="dimensions: is 9; model 'sentence' allows 8, 16, 32"):
        client.embed(SENTENCE, "a", dimensions=9)


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


def test_the_model_describes_its_encoder(client: AttentionClient) -> None:
    model = client.model(SENTENCE)
    encoder, outputs = model.text_encoder, {tensor.name: tensor for tensor in model.outputs}
    assert encoder is not None
    assert (encoder.prompts, encoder.dimensions) == (("query", "document"), DIMENSIONS)
    assert (encoder.num_layers, encoder.embedding_width, encoder.normalised) == (3, encoders.WIDTH, True)
    assert outputs["attention_weights"].axes == ("batch", 3, 4, "query_length", "query_length")


@pytest.mark.parametrize(("layers", "heads"), [((2, 0), ()), ((), (1,)), ((1,), (3, 0, 2))], ids=str)
def test_the_chosen_weights_equal_those_of_all(
    client: AttentionClient, layers: tuple[int, ...], heads: tuple[int, ...]
) -> None:
    texts, chosen = ["life is short", "eat"], HeadSelection(layers=layers, heads=heads)
    complete: Any = client.attend_text(SENTENCE, texts, return_weights=True)
    result: Any = client.attend_text(SENTENCE, texts, return_weights=chosen)
    streamed: Any = next(client.attend_stream(SENTENCE, [TextInputs(texts)], return_weights=chosen))
    for index, weights in enumerate(complete.attention_weights):
        expected = weights[list(layers) or slice(None)][:, list(heads) or slice(None)]
        np.testing.assert_array_equal(result.attention_weights[index], expected)
        np.testing.assert_array_equal(streamed.attention_weights[index], expected)
        np.testing.assert_array_equal(result.context_vectors[index], complete.context_vectors[index])


WRONG = {
    "head_selection.layers: contains 9; the model has 0 to 2": HeadSelection(layers=[9]),
    "head_selection.heads: contains 4; the model has 0 to 3": HeadSelection(heads=[0, 4]),
    "head_selection.heads: names one of them twice": HeadSelection(heads=[1, 1]),
    "return_weights.layers": HeadSelection(layers=[-1]),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_the_model_lacks_is_refused(client: AttentionClient, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words.replace(".", r"\.")):
        client.attend_text(SENTENCE, "eat", return_weights=WRONG[words])


def test_a_stream_mixes_embeddings_and_token_vectors(client: AttentionClient) -> None:
    sequence = token_ids("bert", "dessert")
    requests: list[StreamItem] = [
        EmbeddingInputs(list(TEXTS), prompt="query", dimensions=8),
        TextInputs("dessert"),
        EmbeddingInputs(["a", LONG], truncate=True),
        EmbeddingInputs([sequence, sequence[:4]]),
        EmbeddingInputs(LONG),
    ]
    several, tokens, cut, ids, refused = client.attend_stream(SENTENCE, requests, return_exceptions=True)
    assert isinstance(refused, LimitExceededError)
    expected = client.embed(SENTENCE, list(TEXTS), prompt="query", dimensions=8)
    assert_allclose(several.context_vectors, expected, rtol=RTOL, atol=ATOL)
    assert several.token_counts == tuple(len(token_ids("bert", f"query: {text}")) for text in TEXTS)
    assert (len(tokens.context_vectors), tokens.token_counts) == (len(sequence), (len(sequence),))
    assert (cut.truncated, cut.token_counts) == ((1,), (3, 160))
    expected = client.embed(SENTENCE, [sequence, sequence[:4]])
    assert_allclose(ids.context_vectors, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.thorough
def test_embed_prints_embeddings_or_writes_a_file(
    server: ServerProcess, client: AttentionClient, tmp_path: Path
) -> None:
    texts, out = tmp_path / "texts", tmp_path / "embeddings.npy"
    texts.write_text("dessert\nfirst\n")
    arguments = ["embed", "--server", server.target, "--model", SENTENCE, "--file", str(texts)]
    printed = CliRunner().invoke(app, arguments)
    assert [line.split()[0] for line in printed.stdout.splitlines()] == ["dessert", "first"]
    assert f"{out}: (2, 32) float32" in CliRunner().invoke(app, [*arguments, "--out", str(out)]).stdout
    assert_allclose(np.load(out), client.embed(SENTENCE, ["dessert", "first"]), rtol=RTOL, atol=ATOL)


# Parts of each text of TEXTS: words, several words, one character of several bytes, overlapping parts, none.
SPANS: list[list[tuple[int, int]]] = [
    [(0, 4), (5, 32), (0, 32)],
    [(0, 1)],
    [],
    [(0, 3), (25, 26), (20, 40), (20, 40)],
    [(0, 2), (5, 9)],
    [(0, 1)],
    [(80, 95), (0, 8)],
    [(31, 32)],
]


def embed_by_hand(text: str, start: int, end: int) -> NDArray[np.float32]:
    """The library's token vectors of the whole text, averaged over the tokens that overlap a span."""
    offsets = encoders.tokenizer_of("bert").encode(text).offsets
    tokens = [index for index, (a, b) in enumerate(offsets) if a < b and a < end and start < b]
    return F.normalize(expected_of("bert", text).tokens[tokens].mean(dim=0), dim=0).numpy()


def test_parts_of_a_mixed_batch_equal_late_chunking_by_hand(client: AttentionClient) -> None:
    embeddings = client.embed(SENTENCE, list(TEXTS), spans=SPANS)
    assert [vectors.shape for vectors in embeddings] == [(len(spans), encoders.WIDTH) for spans in SPANS]
    for text, spans, vectors in zip(TEXTS, SPANS, embeddings, strict=True):
        assert vectors.dtype == np.float32
        for vector, span in zip(vectors, spans, strict=True):
            assert_allclose(vector, embed_by_hand(text, *span), rtol=RTOL, atol=ATOL)


def test_offsets_of_tokens(client: AttentionClient) -> None:
    result = client.attend_text(SENTENCE, list(TEXTS), return_offsets=True, return_weights=True)
    assert isinstance(result.offsets, list)
    for text, offsets, vectors in zip(TEXTS, result.offsets, result.context_vectors, strict=True):
        assert offsets.tolist() == [list(span) for span in encoders.tokenizer_of("bert").encode(text).offsets]
        assert offsets.shape == (len(vectors), 2)
    single = client.attend_text(SENTENCE, TEXTS[5], return_offsets=True)
    assert np.asarray(single.offsets).tolist() == [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
    assert client.attend_text(SENTENCE, TEXTS[5]).offsets is None
