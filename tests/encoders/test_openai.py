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
from tests.encoders.repository import SENTENCE, SHORT, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
from tests.support import encoders


@pytest.fixture(scope="module")
def client(encoder_http_port: int) -> openai.OpenAI:
    url = f"http://127.0.0.1:{encoder_http_port}/v1"
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


@pytest.mark.parametrize("form", ["float", "base64"])
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


def test_the_clients_own_form(client: openai.OpenAI) -> None:
    """Without a format, the package asks for base64 and decodes it."""
    answer = client.embeddings.create(model=SENTENCE, input=TEXTS[0])
    assert_allclose(answer.data[0].embedding, expected(TEXTS[0]), rtol=RTOL, atol=ATOL)


def test_token_lists(client: openai.OpenAI) -> None:
    ids = [token_ids("bert", text) for text in TEXTS]
    answer = client.embeddings.create(model=SENTENCE, input=ids)
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert_allclose(each.embedding, expected(text), rtol=RTOL, atol=ATOL)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    one = client.embeddings.create(model=SENTENCE, input=ids[0])
    assert_allclose(one.data[0].embedding, expected(TEXTS[0]), rtol=RTOL, atol=ATOL)


def test_dimensions_and_this_servers_own_members(
    client: openai.OpenAI, encoder_client: AttentionClient
) -> None:
    extra = {"prompt": "query", "truncate": True}
    answer = client.embeddings.create(
        model=SENTENCE, input=["a", "dessert " * 200], dimensions=8, user="someone", extra_body=extra
    )
    same = encoder_client.embed(SENTENCE, "a", prompt="query", dimensions=8)
    assert_allclose(answer.data[0].embedding, same, rtol=RTOL, atol=ATOL)
    assert answer.model_extra == {"truncated": [1]}
    assert answer.usage.prompt_tokens == len("query: a") + 2 + encoders.POSITIONS


def test_a_model_that_cuts_says_so(encoder_http_port: int) -> None:
    status, answer = post(
        encoder_http_port, {"model": TRUNCATING, "input": ["a longer text", "a"], "prompt": ""}
    )
    assert (status, answer["truncated"]) == (200, [0])
    assert answer["usage"]["prompt_tokens"] == SHORT + 3


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


def test_the_text_encoders_are_listed(client: openai.OpenAI, encoder_client: AttentionClient) -> None:
    found = list(client.models.list())
    assert [model.id for model in found] == sorted({model.name for model in encoder_client.models()})
    assert {(model.object, model.created, model.owned_by) for model in found} == {("model", 0, NAME)}
    assert client.models.retrieve(SENTENCE) == next(model for model in found if model.id == SENTENCE)
    with pytest.raises(
        openai.NotFoundError, match=r"'missing' is not a text encoder.*GET /v1/models"
    ) as wrong:
        client.models.retrieve("missing")
    assert (wrong.value.code, wrong.value.param) == ("model_not_found", "model")


WRONG = {
    "no input": ({"model": SENTENCE}, "input", "is required"),
    "no model": ({"input": "a"}, "model", "is required"),
    "empty list": ({"model": SENTENCE, "input": []}, "input", "must be a text"),
    "number": ({"model": SENTENCE, "input": 5}, "input", "must be a text"),
    "mixed": ({"model": SENTENCE, "input": ["a", [1]]}, "input", "texts only"),
    "empty tokens": ({"model": SENTENCE, "input": [[1], []]}, "input", "non-empty lists"),
    "booleans": ({"model": SENTENCE, "input": [True]}, "input", "texts only"),
    "huge id": ({"model": SENTENCE, "input": [2**70]}, "input", "texts only"),
    "unknown id": ({"model": SENTENCE, "input": [10**6]}, "input", "ids must be between 0 and 299"),
    "format": ({"model": SENTENCE, "input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
    "unknown member": ({"model": SENTENCE, "input": "a", "colour": 1}, "colour", "is unknown"),
    "dimensions": (
        {"model": SENTENCE, "input": "a", "dimensions": 0},
        "dimensions",
        "must be greater than or equal to 1",
    ),
    "not JSON": (b"{", "body", "is not JSON"),
    "too many": ({"model": SENTENCE, "input": ["a"] * 5000}, "input", "the limit is 4096"),
}


@pytest.mark.parametrize(("body", "name", "text"), WRONG.values(), ids=WRONG)
def test_wrong_requests_are_refused_by_name(
    encoder_http_port: int, body: object, name: str, text: str
) -> None:
    status, answer = post(encoder_http_port, body)
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert text in error["message"]
    known = {"model", "input", "encoding_format", "dimensions"}
    assert error["param"] == (name if name in known else None)


def test_another_verb_is_refused(encoder_http_port: int) -> None:
    connection = HTTPConnection("127.0.0.1", encoder_http_port, timeout=60)
    connection.request("GET", "/v1/embeddings")
    assert connection.getresponse().status == 405
    connection.close()
