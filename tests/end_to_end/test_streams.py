"""Streams through a live server, with both clients."""

import itertools
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from attention_client import (
    AsyncAttentionClient,
    AttendInputs,
    AttentionClient,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
)

from attention_serving.model.presets import build_preset
from scripts.local_server import ServerProcess
from tests.support.eager import Array, assert_parity, attend

MODEL = "self-attention"


def queries(count: int) -> list[Array]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((index % 40 + 1, 16), dtype=np.float32) for index in range(count)]


def test_answers_come_in_the_order_of_the_requests(client: AttentionClient) -> None:
    asked = queries(200)
    answers = list(client.attend_stream(MODEL, asked, max_in_flight=16))
    eager = [attend(build_preset(MODEL), query)[0] for query in asked]
    assert_parity([answer.context_vectors for answer in answers], eager)


def test_the_error_of_a_refused_request_keeps_its_position(client: AttentionClient) -> None:
    asked = queries(30)
    asked[11] = np.ones((3, 5), np.float32)
    answers = list(client.attend_stream(MODEL, asked, return_exceptions=True))
    assert isinstance(answers[11], InvalidArgumentError)
    assert answers[11].field == "query"
    assert [index for index, answer in enumerate(answers) if isinstance(answer, Exception)] == [11]


def test_the_server_answers_after_a_client_leaves_an_endless_stream(client: AttentionClient) -> None:
    for _ in range(3):
        stream = client.attend_stream(MODEL, itertools.cycle(queries(5)))
        assert len(list(itertools.islice(stream, 40))) == 40
        stream.close()
    assert client.attend(MODEL, queries(1)[0]).context_vectors.shape == (1, 28)


def test_an_error_of_the_callers_iterable_is_raised_to_the_caller(client: AttentionClient) -> None:
    def broken() -> Iterator[Array]:
        yield from queries(3)
        raise LookupError("the table ended")

    answers = client.attend_stream(MODEL, broken())
    assert len(list(itertools.islice(answers, 3))) == 3
    with pytest.raises(LookupError, match="the table ended"):
        next(answers)


def test_unknown_model_in_a_stream(client: AttentionClient) -> None:
    with pytest.raises(NotFoundError, match="nonesuch"):
        list(client.attend_stream("nonesuch", queries(2)))


async def test_asynchronous_client(server: ServerProcess) -> None:
    asked = queries(50)
    key = np.ones((4, 24), np.float32)

    async def items() -> AsyncIterator[AttendInputs]:
        for query in asked:
            yield AttendInputs(query, key=key)

    async with AsyncAttentionClient(server.target) as client:
        await client.wait_until_ready()
        answers = [answer async for answer in client.attend_stream("cross-attention", items())]
        one = await client.attend("cross-attention", asked[0], key, return_weights=True)
        names = [model.name for model in await client.models()]
    module = build_preset("cross-attention")
    assert_parity([a.context_vectors for a in answers], [attend(module, query, key)[0] for query in asked])
    assert one.attention_weights is not None
    assert_parity(one.attention_weights, attend(module, asked[0], key)[1])
    assert "cross-attention" in names


async def test_a_missed_deadline_is_an_error(server: ServerProcess) -> None:
    long = np.ones((4000, 768), np.float32)
    async with AsyncAttentionClient(server.target) as client:
        with pytest.raises(DeadlineExceededError):
            await client.attend("multi-head-768x12", long, timeout=0.02)
        answer = await client.attend("multi-head-768x12", long[:2])
    assert answer.context_vectors.shape == (2, 768)
