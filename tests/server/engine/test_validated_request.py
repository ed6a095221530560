"""The end of a request: one outcome, taken once, of which whoever waits is told once."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from attention_serving.server.engine.errors import EngineError, RunFailedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Result
from tests.server.samples import Sample, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, wait

ROUNDS = 300
OUTCOMES: dict[str, Callable[[], Result | EngineError]] = {
    "result": lambda: Result({}),
    "error": lambda: RunFailedError(MESSAGE),
}


@pytest.fixture(params=OUTCOMES)
def outcome(request: pytest.FixtureRequest) -> Result | EngineError:
    return OUTCOMES[request.param]()


@pytest.fixture
def request_of_one(self_model: LoadedModel) -> Sample:
    return validated_of(self_model, [(2, 2)])


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def taken(request: Sample) -> Result | EngineError:
    """The outcome as whoever waits gets it."""
    try:
        return request.result()
    except EngineError as error:
        return error


@pytest.mark.parametrize("order", ["before", "after"])
def test_whoever_waits_is_told_once(
    request_of_one: Sample, outcome: Result | EngineError, order: str
) -> None:
    told: list[object] = []

    def callback() -> None:
        told.append(taken(request_of_one))

    if order == "before":
        wait(request_of_one, callback)
        assert told == []
    request_of_one.end(outcome)
    if order == "after":
        assert told == []
        wait(request_of_one, callback)
    assert told == [outcome]


def test_whichever_thread_comes_first_whoever_waits_is_told_once(
    self_model: LoadedModel, outcome: Result | EngineError
) -> None:
    requests = [validated_of(self_model, [(1, 1)]) for _ in range(ROUNDS)]
    told: list[int] = []
    together = threading.Barrier(2)

    def ends() -> None:
        for request in requests:
            together.wait(PATIENCE_SECONDS)
            request.end(outcome)

    def waits() -> None:
        for number, request in enumerate(requests):
            together.wait(PATIENCE_SECONDS)
            wait(request, partial(told.append, number))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(ends), pool.submit(waits)]:
            done.result(PATIENCE_SECONDS)
    assert sorted(told) == list(range(ROUNDS))


def test_an_outcome_is_taken_once(request_of_one: Sample, outcome: Result | EngineError) -> None:
    with pytest.raises(ValueError, match="has not ended"):
        request_of_one.result()
    request_of_one.end(outcome)
    assert request_of_one.outcome is outcome
    assert taken(request_of_one) is outcome
    assert request_of_one.outcome is None
    with pytest.raises(ValueError, match="was taken"):
        request_of_one.result()


def test_an_error_is_raised_when_it_is_taken(request_of_one: Sample) -> None:
    error = RunFailedError(MESSAGE)
    request_of_one.end(error)
    assert error.__traceback__ is None
    with pytest.raises(RunFailedError, match=MESSAGE) as caught:
        request_of_one.result()
    assert caught.value is error
    assert [entry.name for entry in caught.traceback] == [
        "test_an_error_is_raised_when_it_is_taken",
        "result",
    ]


def test_nobody_is_told_of_a_request_that_was_withdrawn(request_of_one: Sample) -> None:
    told: list[object] = []
    wait(request_of_one, lambda: told.append("before"))
    request_of_one.end(None)
    wait(request_of_one, lambda: told.append("after"))
    assert told == []
    with pytest.raises(ValueError, match="has not ended"):
        request_of_one.result()


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_error_of_whoever_waits_is_logged(
    request_of_one: Sample, outcome: Result | EngineError, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError(MESSAGE)

    if order == "before":
        wait(request_of_one, fails)
    request_of_one.end(outcome)
    if order == "after":
        wait(request_of_one, fails)
    assert caplog.text.count("callback failed") == 1
    assert taken(request_of_one) is outcome


@pytest.mark.usefixtures("no_collector")
def test_a_request_is_freed_although_its_error_was_raised(self_model: LoadedModel) -> None:
    request = validated_of(self_model, [(2, 2)])
    del request.asked
    freed = weakref.ref(request)
    wait(request, lambda: None)
    request.end(RunFailedError(MESSAGE))
    with suppress(RunFailedError):
        request.result()
    del request
    assert freed() is None
