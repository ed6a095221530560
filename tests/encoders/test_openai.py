"""/v1/embeddings, with the openai package and without it."""

import base64
import json
from http.client import HTTPConnection
from typing import Any

import numpy as np
import openai
import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose

from attention_serving.server import NAME
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
from tests.support import encoders


@pytest.fixture(scope="module")
def client(sentence_http_port: int) -> openai.OpenAI:
    url = f"http://127.0.0.1:{sentence_http_port}/v1"
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0)


def post(port: int, body: object) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", "/v1/embeddings", content)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def expected(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return expected_of("bert", text, normalised=True).embedding.numpy()


# Without a format, the package asks for base64 and decodes it.
@pytest.mark.parametrize("form", ["float", "base64", openai.omit], ids=["float", "base64", "none"])
def test_a_list_of_texts(client: openai.OpenAI, form: Any) -> None:
    answer = client.embeddings.create(model=SENTENCE, input=list(TEXTS), encoding_format=form)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    for text, each in zip(TEXTS, answer.data, strict=True):
        found: Any = each.embedding
        if isinstance(found, str):
            found = np.frombuffer(base64.b64decode(found), np.float32)
        assert_allclose(found, expected(text), rtol=RTOL, atol=ATOL)
    count = sum(len(token_ids("bert", text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert (answer.model, answer.object) == (SENTENCE, "list")


def test_token_lists(client: openai.OpenAI) -> None:
    ids = [token_ids("bert", text) for text in TEXTS]
    answer = client.embeddings.create(model=SENTENCE, input=ids)
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert_allclose(each.embedding, expected(text), rtol=RTOL, atol=ATOL)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    one = client.embeddings.create(model=SENTENCE, input=ids[0])
    assert_allclose(one.data[0].embedding, expected(TEXTS[0]), rtol=RTOL, atol=ATOL)


def test_dimensions_and_this_servers_own_members(
    client: openai.OpenAI, sentence_client: AttentionClient
) -> None:
    extra = {"prompt": "query", "truncate": True}
    answer = client.embeddings.create(
        model=SENTENCE, input=["a", "dessert " * 200], dimensions=8, user="someone", extra_body=extra
    )
    same = sentence_client.embed(SENTENCE, "a", prompt="query", dimensions=8)
    assert_allclose(answer.data[0].embedding, same, rtol=RTOL, atol=ATOL)
    assert answer.model_extra == {"truncated": [1]}
    assert answer.usage.prompt_tokens == len("query: a") + 2 + encoders.POSITIONS


def test_the_packages_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="no-such-model", input="a")
    assert (missing.value.code, missing.value.type) == ("model_not_found", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.embeddings.create(model=SENTENCE, input="a", dimensions=9)
    assert wrong.value.param == "dimensions"
    assert "allows 8, 16, 32" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.embeddings.create(model=SENTENCE, input="dessert " * 200)
    assert (long.value.param, long.value.type) == ("input", "invalid_request_error")


def test_the_text_encoders_are_listed(client: openai.OpenAI, sentence_client: AttentionClient) -> None:
    found = list(client.models.list())
    assert [model.id for model in found] == sorted({model.name for model in sentence_client.models()})
    assert {(model.object, model.created, model.owned_by) for model in found} == {("model", 0, NAME)}
    assert client.models.retrieve(SENTENCE) == next(model for model in found if model.id == SENTENCE)
    with pytest.raises(
        openai.NotFoundError, match=r"'missing' is not a text encoder.*GET /v1/models"
    ) as wrong:
        client.models.retrieve("missing")
    assert (wrong.value.code, wrong.value.param) == ("model_not_found", "model")


# The member at fault, what the request has beside the model and an input, and the refusal.
WRONG: list[tuple[str, dict[str, object], str]] = [
    ("input", {"input": None}, "is required"),
    ("model", {"model": None}, "is required"),
    ("input", {"input": []}, "must be a text"),
    ("input", {"input": 5}, "must be a text"),
    ("input", {"input": ["a", [1]]}, "texts only"),
    ("input", {"input": [[1], []]}, "non-empty lists"),
    ("input", {"input": [True]}, "texts only"),
    ("input", {"input": [2**70]}, "texts only"),
    ("input", {"input": [10**6]}, "ids must be between 0 and 299"),
    ("input", {"input": ["a"] * 5000}, "the limit is 4096"),
    ("encoding_format", {"encoding_format": "hex"}, "float"),
    ("dimensions", {"dimensions": 0}, "must be greater than or equal to 1"),
    ("", {"colour": 1}, "is unknown"),
]


@pytest.mark.parametrize(("name", "changed", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_requests_are_refused_by_name(
    sentence_http_port: int, name: str, changed: dict[str, object], text: str
) -> None:
    body = {"model": SENTENCE, "input": "a"} | changed
    status, answer = post(sentence_http_port, {key: own for key, own in body.items() if own is not None})
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", name or None)
    assert text in error["message"]


def test_other_bodies_and_verbs_are_refused(sentence_http_port: int) -> None:
    status, answer = post(sentence_http_port, b"{")
    assert (status, answer["error"]["param"]) == (400, None)
    assert "is not JSON" in answer["error"]["message"]
    connection = HTTPConnection("127.0.0.1", sentence_http_port, timeout=60)
    connection.request("GET", "/v1/embeddings")
    assert connection.getresponse().status == 405
    connection.close()
