"""Requests over attention.v1 to a live server: answers in order, clear refusals, no neighbour disturbed."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attention_client import (
    AsyncAttentionClient,
    AttendInputs,
    AttentionClient,
    AttentionClientError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
)

from scripts.local_server import ServerProcess
from tests.support.eager import Array, assert_parity, attend
from tests.support.systems import build

MODEL, CROSS, TEXT = "self-attention", "cross-attention", "sentence-self-attention"
Ask = Callable[[AttentionClient], object]


def queries(count: int) -> list[Array]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((index % 40 + 1, 16), dtype=np.float32) for index in range(count)]


REFUSED: list[tuple[Ask, type[AttentionClientError], str, str]] = [
    (
        lambda client: client.attend(MODEL, np.ones((3, 17))),
        InvalidArgumentError,
        "query",
        "rows are 17 wide",
    ),
    (lambda client: client.attend(MODEL, np.ones((9000, 16))), LimitExceededError, "query", "limit is 8192"),
    (lambda client: client.attend_text(TEXT, "Life is cheese"), InvalidArgumentError, "text", "cheese"),
    (lambda client: client.attend("nonesuch", np.ones((2, 2))), NotFoundError, "model_name", "nonesuch"),
]


def test_a_refusal_names_its_field_and_does_not_affect_others(client: AttentionClient) -> None:
    query = queries(5)[4]
    eager, _ = attend(build(MODEL), query)
    with ThreadPoolExecutor(8) as pool:
        refused = [(pool.submit(ask, client), kind, field, text) for ask, kind, field, text in REFUSED * 5]
        served = [pool.submit(client.attend, MODEL, query) for _ in range(40)]
        for answered in served:
            assert_parity(answered.result().context_vectors, eager)
        for answer, kind, field, text in refused:
            with pytest.raises(kind, match=text) as caught:
                answer.result()
            assert caught.value.field == field


def test_a_stream_answers_in_order_and_a_refused_request_keeps_its_position(client: AttentionClient) -> None:
    asked = queries(100)
    asked[11] = np.ones((3, 5), np.float32)
    answers = list(client.attend_stream(MODEL, asked, max_in_flight=16, return_exceptions=True))
    assert isinstance(answers[11], InvalidArgumentError)
    assert answers[11].field == "query"
    found = [each.context_vectors for each in answers if not isinstance(each, AttentionClientError)]
    assert_parity(found, [attend(build(MODEL), query)[0] for query in asked if query.shape[1] == 16])


async def test_the_asynchronous_client(server: ServerProcess) -> None:
    asked, key = queries(50), np.ones((4, 24), np.float32)

    async def items() -> AsyncIterator[AttendInputs]:
        for query in asked:
            yield AttendInputs(query, key=key)

    async with AsyncAttentionClient(server.target) as client:
        answers = [answer async for answer in client.attend_stream(CROSS, items())]
        one = await client.attend(CROSS, asked[0], key, return_weights=True)
    module = build(CROSS)
    assert_parity(
        [each.context_vectors for each in answers], [attend(module, each, key)[0] for each in asked]
    )
    assert one.attention_weights is not None
    assert_parity(one.attention_weights, attend(module, asked[0], key)[1])
