"""Text encoders over the Open Inference Protocol, with tritonclient."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
from tests.support import encoders, triton
from tests.support.triton import Array, TritonError


def ask(server: ServerProcess, model: str, *texts: str, **options: Any) -> dict[str, Array]:
    data = np.array([text.encode() for text in texts], dtype=object)
    return triton.infer(server.target, model, {"text": data}, **options)


def test_the_default_outputs_are_embeddings_and_token_counts(encoder_server: ServerProcess) -> None:
    result = ask(encoder_server, SENTENCE, *TEXTS)
    expected = np.stack([expected_of("bert", text, normalised=True).embedding.numpy() for text in TEXTS])
    assert_allclose(result["embedding"], expected, rtol=RTOL, atol=ATOL)
    assert result["lengths"].tolist() == [len(token_ids("bert", text)) for text in TEXTS]
    assert set(result) == {"embedding", "lengths"}


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_every_output_by_request(encoder_server: ServerProcess, name: str) -> None:
    asked = ["attention_weights", "context_vectors", "embedding"]
    result = ask(encoder_server, name, *TEXTS, outputs=asked)
    weights, tokens = result["attention_weights"], result["context_vectors"]
    for index, text in enumerate(TEXTS):
        expected, count = expected_of(name, text), len(token_ids(name, text))
        assert_allclose(tokens[index, :count], expected.tokens.numpy(), rtol=RTOL, atol=ATOL)
        assert not tokens[index, count:].any()
        own = weights[index, :, :, :count, :count]
        assert_allclose(own, expected.weights.numpy(), rtol=RTOL, atol=ATOL)
        assert_allclose(result["embedding"][index], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)


def test_token_ids_with_lengths(encoder_server: ServerProcess) -> None:
    sequences = [encoders.random_ids("bert", length) for length in (3, 9)]
    ids = np.array([[*sequences[0], *[0] * 6], sequences[1]])
    given = {"token_ids": ids, "key_lengths": np.array([3, 9])}
    found = triton.infer(encoder_server.target, "bert", given)["embedding"]
    for index, sequence in enumerate(sequences):
        alone = triton.infer(encoder_server.target, "bert", {"token_ids": np.array([sequence])})
        assert_allclose(found[index], alone["embedding"][0], rtol=RTOL, atol=ATOL)


def test_prompt_dimensions_and_truncation_as_parameters(encoder_server: ServerProcess) -> None:
    long = "dessert " * 200
    parameters = {"prompt": "query", "dimensions": 8, "truncate": True}
    result = ask(encoder_server, SENTENCE, "a", long, parameters=parameters)
    whole = ask(encoder_server, SENTENCE, "query: a")["embedding"][0, :8]
    assert_allclose(result["embedding"][0], whole / np.linalg.norm(whole), rtol=RTOL, atol=ATOL)
    assert result["lengths"].tolist() == [len("query: a") + 2, encoders.POSITIONS]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dimensions": 9}, "dimensions: is 9; model 'sentence' allows 8, 16, 32"),
        ({"dimensions": 0}, "dimensions: is 0; must be a positive integer"),
        ({"dimensions": "8"}, "dimensions: must be a positive integer"),
        ({"prompt": "other"}, "prompt: is 'other'; must be one of query, document"),
        ({"prompt": 1}, "prompt: must be a string"),
        ({"truncate": "yes"}, "truncate: must be a boolean"),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    encoder_server: ServerProcess, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(TritonError, match=message):
        ask(encoder_server, SENTENCE, "a", parameters=parameters)
