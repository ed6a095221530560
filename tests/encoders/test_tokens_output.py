"""The output `tokens` of models that take text, over gRPC and HTTP."""

import numpy as np
import pytest

from scripts.local_server import ServerProcess
from tests.encoders.texts import TEXTS, token_ids
from tests.server.http.clients import ask
from tests.support import encoders, triton
from tests.support.triton import TritonError

# The tokens of these tokenizers are bytes: a letter by itself, and the name of a byte that is none.
EXPECTED = {"a b": ["<s>", "a", "Ġ", "b", "</s>"], "ß": ["<s>", "Ã", "Ł", "</s>"]}


def texts_of(array: triton.Array) -> list[list[str]]:
    return [[element.decode() for element in row] for row in array]


def test_the_text_of_each_token_with_padding(encoder_server: ServerProcess) -> None:
    data = np.array([text.encode() for text in EXPECTED], dtype=object)
    result = triton.infer(
        encoder_server.target, "bert", {"text": data}, outputs=["tokens", "lengths", "embedding"]
    )
    longest = max(map(len, EXPECTED.values()))
    assert texts_of(result["tokens"]) == [row + [""] * (longest - len(row)) for row in EXPECTED.values()]
    assert result["lengths"].tolist() == [len(row) for row in EXPECTED.values()]
    assert result["embedding"].shape == (2, encoders.WIDTH)


def test_as_many_as_ids_for_texts_of_every_script(encoder_server: ServerProcess) -> None:
    data = np.array([text.encode() for text in TEXTS], dtype=object)
    found = texts_of(
        triton.infer(encoder_server.target, "bert", {"text": data}, outputs=["tokens"])["tokens"]
    )
    assert [sum(map(bool, row)) for row in found] == [len(token_ids("bert", text)) for text in TEXTS]


def test_token_ids_have_texts_too(encoder_server: ServerProcess) -> None:
    ids = np.array([token_ids("bert", "ab")])
    given = {"token_ids": ids, "key_lengths": np.array([3])}
    found = triton.infer(encoder_server.target, "bert", given, outputs=["tokens"])
    assert texts_of(found["tokens"]) == [["<s>", "a", "b", ""]]


def test_as_json(encoder_http_port: int) -> None:
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["ab"]}
    answer = ask(
        encoder_http_port, "/v2/models/bert/infer", {"inputs": [text], "outputs": [{"name": "tokens"}]}
    )
    (output,) = answer.json["outputs"]
    assert output == {
        "name": "tokens",
        "datatype": "BYTES",
        "shape": [1, 4],
        "data": ["<s>", "a", "b", "</s>"],
    }


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_ids": np.array([[1.5]], np.float32)}, "token_ids"),
        ({"token_ids": np.array([[10**6]])}, "token_ids"),
        ({"token_ids": np.array([[-1]])}, "token_ids"),
    ],
    ids=["real", "too-large", "negative"],
)
def test_wrong_ids_are_refused_as_without_the_output(
    encoder_server: ServerProcess, inputs: dict[str, triton.Array], message: str
) -> None:
    def refused(outputs: list[str]) -> str:
        with pytest.raises(TritonError) as caught:
            triton.infer(encoder_server.target, "bert", inputs, outputs=outputs)
        return str(caught.value)

    assert message in refused(["tokens"])
    assert refused(["tokens"]) == refused(["embedding"])
