"""Nothing keeps a request or its arrays alive once it has ended: they are freed without the collector."""

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from attention_serving.server.coroutines import Callback, Task
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array, MaskKind, Result
from tests.server.samples import Sample, request_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, Gate, tapped


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Also without records of the log, which keep the frames of a failed run."""
    gc.collect()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


class Watch:
    """What is to be freed."""

    def __init__(self) -> None:
        self._references: dict[str, weakref.ref[Any]] = {}
        self._freed = threading.Semaphore(0)

    def add(self, name: str, watched: object) -> None:
        self._references[name] = weakref.ref(watched, lambda _: self._freed.release())

    def assert_freed(self, *names: str) -> None:
        """All that is watched is freed: a thread lets go of it before it waits."""
        assert sorted(self._references) == sorted(names)
        until = time.monotonic() + PATIENCE_SECONDS
        for _ in names:
            self._freed.acquire(timeout=max(0.0, until - time.monotonic()))
        assert [name for name, reference in self._references.items() if reference() is not None] == []


ASKED = ("request", "query", "key", "value", "mask")
OUTPUTS = ("context_vectors", "attention_weights")


class Asked:
    """A caller, whose request is watched."""

    def __init__(self, engine: Engine, model: LoadedModel, deadline: float = math.inf) -> None:
        self.engine, self.watch = engine, Watch()
        self.start(self._request(model, deadline))

    def _request(self, model: LoadedModel, deadline: float) -> ValidatedRequest:
        request = request_of(
            model, [(2, 3), (5, 4)], kind=MaskKind.PAIRS, return_weights=True, deadline=deadline
        )
        assert request.mask is not None
        for name, own in request.inputs.items():
            self.watch.add(name, own.rows)
        self.watch.add("mask", request.mask.data)
        validated = Sample(validate(request, model, self.engine.limits))
        del validated.asked
        self.watch.add("request", validated)
        return validated

    def start(self, request: ValidatedRequest) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Gives the request up."""
        raise NotImplementedError

    def wait(self) -> str:
        """Waits until the request has ended; returns how."""
        raise NotImplementedError

    def _took(self, result: Result) -> str:
        for name, arrays in result.outputs.items():
            self.watch.add(name, arrays[0])
        return "answered"


class AskedByCoroutine(Asked):
    """A coroutine, which the thread of the test drives."""

    def start(self, request: ValidatedRequest) -> None:
        self._posted: SimpleQueue[Callback] = SimpleQueue()
        self._ended = ""
        self._task = Task(self._work(request), self._posted.put)
        self._task.resume()

    async def _work(self, request: ValidatedRequest) -> None:
        reservation = self.engine.budget.reserve(0)
        try:
            self._ended = self._took(await self.engine.run(request, reservation))
        except EngineError as error:
            self._ended = type(error).__name__
        finally:
            reservation.release()

    def leave(self) -> None:
        self._task.close()
        self._ended = CancelledError.__name__

    def wait(self) -> str:
        while not self._ended:
            self._posted.get(timeout=PATIENCE_SECONDS)()
        return self._ended


class AskedInline(AskedByCoroutine):
    """A coroutine, whose thread runs short batches too."""

    def start(self, request: ValidatedRequest) -> None:
        self.engine.run_inline(math.inf)
        super().start(request)

    def wait(self) -> str:
        while not self._ended and self.engine.run_inline(math.inf):
            while not self._posted.empty():
                self._posted.get()()
        return super().wait()


@pytest.fixture(params=[AskedByCoroutine, AskedInline], ids=["coroutine", "inline"])
def kind(request: pytest.FixtureRequest) -> type[Asked]:
    kind: type[Asked] = request.param
    return kind


@contextmanager
def engine_of(model: LoadedModel) -> Iterator[Engine]:
    """An engine that runs every sequence by itself, one after the other."""
    engine = Engine(Repository([model]), Limits(max_batch_sequences=1), parallel_runs=1)
    try:
        yield engine
    finally:
        engine.close()


def test_an_answered_request_is_freed(cross_model: LoadedModel, kind: type[Asked]) -> None:
    with engine_of(cross_model) as engine:
        asked = kind(engine, cross_model)
        assert asked.wait() == "answered"
        asked.watch.assert_freed(*ASKED, *OUTPUTS)


def test_a_request_whose_second_run_fails_is_freed(cross_model: LoadedModel, kind: type[Asked]) -> None:
    runs: list[int] = []

    def tap(_: dict[str, Array]) -> None:
        runs.append(len(runs))
        if len(runs) == 2:
            raise RuntimeError(MESSAGE)

    with engine_of(cross_model) as engine:
        asked = kind(engine, tapped(cross_model, tap))
        assert asked.wait() == "RunFailedError"
        asked.watch.assert_freed(*ASKED)


def test_an_expired_request_is_freed(cross_model: LoadedModel, kind: type[Asked]) -> None:
    with engine_of(cross_model) as engine:
        asked = kind(engine, cross_model, time.monotonic())
        assert asked.wait() == "DeadlineExceededError"
        asked.watch.assert_freed(*ASKED)


def test_a_refused_request_is_freed(cross_model: LoadedModel, kind: type[Asked]) -> None:
    with engine_of(cross_model) as engine:
        engine.close()
        asked = kind(engine, cross_model)
        assert asked.wait() == "ShuttingDownError"
        asked.watch.assert_freed(*ASKED)


def test_a_request_that_is_withdrawn_from_the_queue_is_freed_during_the_run_of_another(
    cross_model: LoadedModel, kind: type[Asked]
) -> None:
    gate = Gate()
    with engine_of(cross_model) as engine:
        held = AskedByCoroutine(engine, tapped(cross_model, gate))
        assert gate.entered.wait(PATIENCE_SECONDS)
        asked = kind(engine, cross_model)
        asked.leave()
        assert asked.wait() == "CancelledError"
        asked.watch.assert_freed(*ASKED)
        gate.open()
        assert held.wait() == "answered"


def test_a_request_that_is_withdrawn_during_its_run_is_freed_after_it(cross_model: LoadedModel) -> None:
    gate = Gate()
    with engine_of(cross_model) as engine:
        asked = AskedByCoroutine(engine, tapped(cross_model, gate))
        assert gate.entered.wait(PATIENCE_SECONDS)
        asked.leave()
        assert asked.wait() == "CancelledError"
        gate.open()
        asked.watch.assert_freed(*ASKED)
