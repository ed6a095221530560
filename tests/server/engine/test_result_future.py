"""What a `Future` of the standard library does, and that a `ResultFuture` does the same."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, as_completed, wait
from contextlib import suppress

import pytest
from attention_serving.server.engine.result_future import ResultFuture

SOON = 0.05
LONG = 30.0
Make = Callable[[], "Future[int]"]


@pytest.fixture(params=[Future, ResultFuture])
def future(request: pytest.FixtureRequest) -> "Future[int]":
    made: Future[int] = request.param()
    return made


def finish(future: "Future[int]", end: str) -> None:
    match end:
        case "result":
            future.set_result(7)
        case "exception":
            future.set_exception(KeyError("7"))
        case "cancel":
            assert future.cancel()


def outcome(future: "Future[int]", timeout: float | None = None) -> object:
    try:
        return future.result(timeout)
    except (KeyError, CancelledError) as error:
        return type(error)


OUTCOMES = {"result": 7, "exception": KeyError, "cancel": CancelledError}


@pytest.mark.parametrize("end", OUTCOMES)
def test_it_has_one_outcome(future: "Future[int]", end: str) -> None:
    assert (future.done(), future.cancelled(), future.running()) == (False, False, False)

    finish(future, end)

    assert (future.done(), future.cancelled()) == (True, end == "cancel")
    assert outcome(future) is OUTCOMES[end] or outcome(future) == OUTCOMES[end]
    assert future.cancel() is (end == "cancel")
    for again in ("result", "exception"):
        with pytest.raises(InvalidStateError):
            finish(future, again)
    assert outcome(future) == OUTCOMES[end]


@pytest.mark.parametrize("kind", [Future, ResultFuture])
def test_it_is_freed_although_its_exception_was_raised(kind: Make) -> None:
    future = kind()
    freed = weakref.ref(future)
    future.set_exception(KeyError("7"))
    gc.disable()
    try:
        with suppress(KeyError):
            future.result()
        del future
        assert freed() is None
    finally:
        gc.enable()


def test_an_exception_is_returned_too(future: "Future[int]") -> None:
    with pytest.raises(TimeoutError):
        future.exception(SOON)
    error = KeyError("7")
    future.set_exception(error)

    assert future.exception() is error


def test_a_result_has_no_exception_and_a_cancelled_future_raises(future: "Future[int]") -> None:
    other = type(future)()
    future.set_result(0)
    other.cancel()

    assert future.exception() is None
    with pytest.raises(CancelledError):
        other.exception()


@pytest.mark.parametrize("end", OUTCOMES)
def test_callbacks_come_once_in_their_order_and_at_once_if_it_has_ended(
    future: "Future[int]", end: str, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def fails(_future: "Future[int]") -> None:
        called.append(2)
        raise RuntimeError

    future.add_done_callback(lambda own: called.append(1 if own is future else 0))
    future.add_done_callback(fails)
    future.add_done_callback(lambda _: future.add_done_callback(lambda _: called.append(3)))
    finish(future, end)
    future.add_done_callback(lambda own: called.append(4 if own.done() else 0))
    future.add_done_callback(fails)

    assert called == [1, 2, 3, 4, 2]
    assert caplog.text.count("exception calling callback") == 2


@pytest.mark.parametrize("end", OUTCOMES)
def test_threads_that_wait_are_woken(future: "Future[int]", end: str) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(outcome(future, LONG))) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        future.result(SOON)
    finish(future, end)
    for thread in threads:
        thread.join(LONG)

    assert found == [OUTCOMES[end]] * 4


@pytest.mark.parametrize("end", ["result", "exception"])
def test_the_functions_of_the_standard_library_wait_for_it(future: "Future[int]", end: str) -> None:
    never = type(future)()
    timer = threading.Timer(SOON, finish, (future, end))
    timer.start()

    assert next(as_completed([never, future], LONG)) is future
    assert wait([never, future], SOON).done == {future}


@pytest.mark.parametrize("end", OUTCOMES)
def test_no_wake_up_is_lost(end: str) -> None:
    """The condition is made while another thread ends the future."""
    for _ in range(300):
        future, found = ResultFuture[int](), list[object]()
        start = threading.Barrier(3)

        def waits(future: "Future[int]", found: list[object], start: threading.Barrier) -> None:
            start.wait()
            found.append(outcome(future, LONG))

        threads = [threading.Thread(target=waits, args=(future, found, start)) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        finish(future, end)
        for thread in threads:
            thread.join(LONG)
        assert found == [OUTCOMES[end]] * 2


def test_its_state_is_shown(future: "Future[int]") -> None:
    assert "state=pending" in repr(future)
    future.set_result(7)
    assert "state=finished returned int" in repr(future)
