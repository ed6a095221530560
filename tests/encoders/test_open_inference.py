"""Text encoders over the Open Inference Protocol, with tritonclient and as JSON."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
from tests.support import encoders, triton
from tests.support.triton import Array

# The tokens of these tokenizers are bytes: a letter by itself, and the name of a byte that is none.
TOKENS = {"a b": ["<s>", "a", "Ġ", "b", "</s>"], "ß": ["<s>", "Ã", "Ł", "</s>"]}


def ask(server: ServerProcess, *texts: str, **options: Any) -> dict[str, Array]:
    data = np.array([text.encode() for text in texts], dtype=object)
    return triton.infer(server.target, SENTENCE, {"text": data}, **options)


def texts_of(array: Array) -> list[list[str]]:
    return [[element.decode() for element in row] for row in array]


def test_every_output_by_request(server: ServerProcess) -> None:
    result = ask(server, *TEXTS, outputs=["attention_weights", "context_vectors", "tokens"])
    weights, vectors, tokens = (result[name] for name in ("attention_weights", "context_vectors", "tokens"))
    for index, text in enumerate(TEXTS):
        expected, count = expected_of("bert", text), len(token_ids("bert", text))
        assert_allclose(vectors[index, :count], expected.tokens.numpy(), rtol=RTOL, atol=ATOL)
        assert not vectors[index, count:].any()
        valid = weights[index, :, :, :count, :count]
        assert_allclose(valid, expected.weights.numpy(), rtol=RTOL, atol=ATOL)
        assert [bool(token) for token in tokens[index]] == [at < count for at in range(tokens.shape[1])]


def test_the_text_of_each_token_with_padding(server: ServerProcess) -> None:
    result = ask(server, *TOKENS, outputs=["tokens", "lengths", "embedding"])
    longest = max(map(len, TOKENS.values()))
    assert texts_of(result["tokens"]) == [row + [""] * (longest - len(row)) for row in TOKENS.values()]
    assert result["lengths"].tolist() == [len(row) for row in TOKENS.values()]
    ids = {"token_ids": np.array([token_ids("bert", "ab")]), "key_lengths": np.array([3])}
    found = triton.infer(server.target, SENTENCE, ids, outputs=["tokens"])
    assert texts_of(found["tokens"]) == [["<s>", "a", "b", ""]]


def test_prompt_dimensions_and_truncation_as_parameters(server: ServerProcess) -> None:
    parameters = {"prompt": "query", "dimensions": 8, "truncate": True}
    result = ask(server, "a", "dessert " * 200, parameters=parameters)
    assert set(result) == {"embedding", "lengths"}  # without a wish for others
    whole = expected_of("bert", "query: a", normalised=True).embedding.numpy()[:8]
    assert_allclose(result["embedding"][0], whole / np.linalg.norm(whole), rtol=RTOL, atol=ATOL)
    assert result["lengths"].tolist() == [len("query: a") + 2, encoders.POSITIONS]


def test_the_kind_of_texts_and_the_side_of_truncation_as_parameters(server: ServerProcess) -> None:
    kind = ask(server, "a", parameters={"input_kind": "query"})
    assert_allclose(kind["embedding"], ask(server, "a", parameters={"prompt": "query"})["embedding"], rtol=0)
    text = "a" + "dessert " * 200 + "b"
    for side, kept in (("right", text[: encoders.POSITIONS - 2]), ("left", text[2 - encoders.POSITIONS :])):
        cut = ask(server, text, parameters={"truncate": True, "truncation_side": side})
        expected = expected_of("bert", kept, normalised=True).embedding.numpy()
        assert_allclose(cut["embedding"][0], expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"input_kind": "passage"}, "input_kind: is 'passage'; must be one of query, document"),
        ({"truncation_side": 1}, "truncation_side: must be one of right, left"),
        ({"input_kind": "query", "prompt": ""}, "cannot be combined with prompt"),
    ],
)
def test_wrong_parameters_of_texts_are_refused(
    server: ServerProcess, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(triton.TritonError, match=message):
        ask(server, "a", parameters=parameters)
