"""Requests over attention.v1 to a live server: answers in order, clear refusals, no neighbour disturbed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    AttentionClientError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
)

from scripts.local_server import ServerProcess
from tests.support.eager import assert_parity, attend
from tests.support.systems import build

MODEL, CROSS = "self-attention", "cross-attention"
REFUSED = [
    (MODEL, (3, 17), InvalidArgumentError, "query", "rows are 17 wide"),
    (MODEL, (9000, 16), LimitExceededError, "query", "limit is 8192"),
    ("nonesuch", (2, 2), NotFoundError, "model_name", "nonesuch"),
]


def test_a_refusal_names_its_field_and_does_not_affect_others(client: AttentionClient) -> None:
    query = np.random.default_rng(7).standard_normal((5, 16), np.float32)
    eager, _ = attend(build(MODEL), query)
    with ThreadPoolExecutor(8) as pool:
        refused = [
            (pool.submit(client.attend, model, np.ones(shape)), kind, field, text)
            for model, shape, kind, field, text in REFUSED * 5
        ]
        served = [pool.submit(client.attend, MODEL, query) for _ in range(40)]
        for answered in served:
            assert_parity(answered.result().context_vectors, eager)
        for answer, kind, field, text in refused:
            with pytest.raises(kind, match=text) as caught:
                answer.result()
            assert caught.value.field == field


def test_a_stream_answers_in_order_and_a_refused_request_keeps_its_position(client: AttentionClient) -> None:
    rng = np.random.default_rng(7)
    asked = [rng.standard_normal((index % 40 + 1, 16), np.float32) for index in range(100)]
    asked[11] = np.ones((3, 5), np.float32)
    answers = list(client.attend_stream(MODEL, asked, max_in_flight=16, return_exceptions=True))
    assert isinstance(answers[11], InvalidArgumentError)
    assert answers[11].field == "query"
    found = [each.context_vectors for each in answers if not isinstance(each, AttentionClientError)]
    assert_parity(found, [attend(build(MODEL), query)[0] for query in asked if query.shape[1] == 16])


async def test_the_asynchronous_client(server: ServerProcess) -> None:
    query, key = np.ones((3, 16), np.float32), np.ones((4, 24), np.float32)
    async with AsyncAttentionClient(server.target) as client:
        answer = await client.attend(CROSS, query, key, return_weights=True)
    context, weights = attend(build(CROSS), query, key)
    assert_parity(answer.context_vectors, context)
    assert answer.attention_weights is not None
    assert_parity(answer.attention_weights, weights)
