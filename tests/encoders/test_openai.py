"""/v1/embeddings of a live server with the openai package; tests/server/http has requests and errors."""

import base64
from typing import Any

import numpy as np
import openai
import pytest
from numpy.testing import assert_allclose

from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids


@pytest.fixture(scope="module")
def client(port: int) -> openai.OpenAI:
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0)


# Without a format, the package asks for base64 and decodes it.
@pytest.mark.parametrize("form", ["float", "base64", openai.omit], ids=["float", "base64", "none"])
def test_a_list_of_texts(client: openai.OpenAI, form: Any) -> None:
    answer = client.embeddings.create(model=SENTENCE, input=list(TEXTS), encoding_format=form)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    for text, each in zip(TEXTS, answer.data, strict=True):
        found: Any = each.embedding
        if isinstance(found, str):
            found = np.frombuffer(base64.b64decode(found), np.float32)
        expected = expected_of("bert", text, normalised=True).embedding.numpy()
        assert_allclose(found, expected, rtol=RTOL, atol=ATOL)
    count = sum(len(token_ids("bert", text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert (answer.model, answer.object) == (SENTENCE, "list")


def test_an_unknown_path_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match="/v1/completions: there is no such path; /docs lists them"
    ):
        client.completions.create(model=SENTENCE, prompt="Life is short")
