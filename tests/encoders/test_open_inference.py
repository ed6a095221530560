"""Text encoders over the Open Inference Protocol, with tritonclient."""

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.testing import assert_allclose
from tritonclient.utils import InferenceServerException

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
from tests.support import encoders


@pytest.fixture(scope="module")
def client(encoder_server: ServerProcess) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(encoder_server.target)


def text_input(*texts: str) -> triton.InferInput:
    data = np.array([text.encode() for text in texts], dtype=object)
    given = triton.InferInput("text", [len(texts)], "BYTES")
    given.set_data_from_numpy(data)
    return given


def outputs(*names: str) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name) for name in names]


def test_the_default_outputs_are_embeddings_and_token_counts(client: triton.InferenceServerClient) -> None:
    result = client.infer(SENTENCE, [text_input(*TEXTS)])
    expected = np.stack([expected_of("bert", text, normalised=True).embedding.numpy() for text in TEXTS])
    assert_allclose(result.as_numpy("embedding"), expected, rtol=RTOL, atol=ATOL)
    counts = [len(token_ids("bert", text)) for text in TEXTS]
    assert result.as_numpy("lengths").tolist() == counts
    assert result.as_numpy("context_vectors") is None


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_every_output_by_request(client: triton.InferenceServerClient, name: str) -> None:
    asked = outputs("attention_weights", "context_vectors", "embedding")
    result = client.infer(name, [text_input(*TEXTS)], outputs=asked)
    weights, tokens = result.as_numpy("attention_weights"), result.as_numpy("context_vectors")
    for index, text in enumerate(TEXTS):
        expected, count = expected_of(name, text), len(token_ids(name, text))
        assert_allclose(tokens[index, :count], expected.tokens.numpy(), rtol=RTOL, atol=ATOL)
        assert not tokens[index, count:].any()
        own = weights[index, :, :, :count, :count]
        assert_allclose(own, expected.weights.numpy(), rtol=RTOL, atol=ATOL)
        assert_allclose(result.as_numpy("embedding")[index], expected.embedding.numpy(), rtol=RTOL, atol=ATOL)


def test_token_ids_with_lengths(client: triton.InferenceServerClient) -> None:
    sequences = [encoders.random_ids("bert", length) for length in (3, 9)]
    ids, lengths = (
        triton.InferInput("token_ids", [2, 9], "INT64"),
        triton.InferInput("key_lengths", [2], "INT64"),
    )
    ids.set_data_from_numpy(np.array([[*sequences[0], *[0] * 6], sequences[1]]))
    lengths.set_data_from_numpy(np.array([3, 9]))
    found = client.infer("bert", [ids, lengths]).as_numpy("embedding")
    for index, sequence in enumerate(sequences):
        alone = triton.InferInput("token_ids", [1, len(sequence)], "INT64")
        alone.set_data_from_numpy(np.array([sequence]))
        same = client.infer("bert", [alone]).as_numpy("embedding")[0]
        assert_allclose(found[index], same, rtol=RTOL, atol=ATOL)


def test_prompt_dimensions_and_truncation_as_parameters(client: triton.InferenceServerClient) -> None:
    long = "dessert " * 200
    parameters = {"prompt": "query", "dimensions": 8, "truncate": True}
    result = client.infer(SENTENCE, [text_input("a", long)], parameters=parameters)
    whole = client.infer(SENTENCE, [text_input("query: a")]).as_numpy("embedding")[0, :8]
    assert_allclose(result.as_numpy("embedding")[0], whole / np.linalg.norm(whole), rtol=RTOL, atol=ATOL)
    assert result.as_numpy("lengths").tolist() == [len("query: a") + 2, encoders.POSITIONS]
    assert result.get_response().parameters["truncated"].string_param == "1"


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
    client: triton.InferenceServerClient, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        client.infer(SENTENCE, [text_input("a")], parameters=parameters)
