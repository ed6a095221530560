"""The time limit of an attempt: a call that a server does not answer is repeated, over real gRPC."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_server import Service, running

from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    DeadlineExceededError,
    InvalidArgumentError,
)

QUERY = np.arange(6, dtype=np.float32).reshape(2, 3)


def attend_sync(target: Any, **options: Any):
    with AttentionClient(target, **options) as client:
        return client.attend("m", QUERY)


def attend_async(target: Any, **options: Any):
    async def ask() -> Any:
        async with AsyncAttentionClient(target, **options) as client:
            return await client.attend("m", QUERY)

    return asyncio.run(ask())


Call = Callable[..., Any]
BOTH_CLIENTS = pytest.mark.parametrize("call", [attend_sync, attend_async])


class Silent:
    """Does not answer the first attempts until the test ends."""

    def __init__(self, attempts: int) -> None:
        self.released = threading.Event()
        self._remaining = iter(range(attempts))

    def __call__(self, _context: grpc.ServicerContext) -> None:
        if next(self._remaining, None) is not None:
            self.released.wait(60)


@pytest.fixture
def silent() -> Iterator[Callable[[int], Silent]]:
    made: list[Silent] = []

    def make(attempts: int) -> Silent:
        made.append(Silent(attempts))
        return made[-1]

    yield make
    for each in made:
        each.released.set()


@BOTH_CLIENTS
def test_an_attempt_without_an_answer_is_repeated(call: Call, silent: Callable[[int], Silent]):
    behaviour = silent(2)
    service = Service(behaviour)
    with running(service) as target:
        result = call(target, attempt_timeout=0.2)
        behaviour.released.set()
    np.testing.assert_array_equal(result.context_vectors, QUERY)
    assert len(service.attempts) == 3


@BOTH_CLIENTS
def test_a_call_without_any_answer_ends_with_its_attempts(call: Call, silent: Callable[[int], Silent]):
    behaviour = silent(100)
    service = Service(behaviour)
    with running(service) as target:
        with pytest.raises(DeadlineExceededError, match="within attempt_timeout"):
            call(target, attempt_timeout=0.2, max_retries=1)
        behaviour.released.set()
    assert len(service.attempts) == 2


def test_streams_have_no_limit_for_an_attempt(silent: Callable[[int], Silent]):
    behaviour = silent(1)
    service = Service(behaviour)
    timer = threading.Timer(1.0, behaviour.released.set)
    with running(service) as target, AttentionClient(target, attempt_timeout=0.1) as client:
        timer.start()
        (result,) = client.attend_stream("m", [QUERY])
    np.testing.assert_array_equal(result.context_vectors, QUERY)
    assert len(service.attempts) == 1


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, "1"], ids=repr)
def test_the_limit_is_a_positive_number(limit: Any):
    with pytest.raises(InvalidArgumentError, match="a positive, finite number") as caught:
        AttentionClient("127.0.0.1:1", attempt_timeout=limit)
    assert caught.value.field == "attempt_timeout"


def test_the_limit_needs_retries():
    with pytest.raises(InvalidArgumentError, match="max_retries is 0"):
        AttentionClient("127.0.0.1:1", attempt_timeout=1, max_retries=0)
