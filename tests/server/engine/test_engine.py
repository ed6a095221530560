"""How a request ends for a coroutine that awaits it, and for a thread that has its future."""

from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from attention_serving.server.coroutines import Callback, Task
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, EngineError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.statistics import ExpiryStage, Timeline
from attention_serving.server.engine.types import Array, Result
from tests.server.samples import SELF, Sample, assert_answers, request_of, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, Gate, Recorder, tapped
from tests.support import coroutines
from tests.support.coroutines import submitted


class Expiries(Recorder):
    """Records where requests were when their deadlines passed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[ExpiryStage] = []

    def request_expired(self, model: str, stage: ExpiryStage) -> None:
        assert model == SELF
        self.stages.append(stage)


class Held:
    """An engine whose first run is under way and held; others wait."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.gate, self.recorder = model, Gate(), Expiries()
        self.engine = Engine(
            Repository([model]), Limits(max_batch_sequences=1), self.recorder, parallel_runs=1
        )
        self.first = Caller(self.engine, validated_of(tapped(model, self.gate), [(1, 1)]))
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def ask(self, seed: int = 0) -> "Caller":
        return Caller(self.engine, validated_of(self.model, [(2, 2)], seed=seed))

    def finish(self) -> None:
        self.gate.open()
        self.engine.close()


class Caller:
    """A coroutine that awaits a result, and is driven by the thread of the test."""

    def __init__(self, engine: Engine, request: Sample) -> None:
        self.request = request
        self.ended: list[Result | EngineError] = []
        self._posted: SimpleQueue[Callback] = SimpleQueue()
        self.task = Task(self._work(engine), self._posted.put)
        self.task.resume()

    async def _work(self, engine: Engine) -> None:
        reservation = engine.budget.reserve(0)
        try:
            self.ended.append(await engine.run(self.request, reservation))
        except EngineError as error:
            self.ended.append(error)
        finally:
            reservation.release()

    def wait(self) -> Result | EngineError:
        """Drives the coroutine to its end."""
        while not self.ended:
            self._posted.get(timeout=PATIENCE_SECONDS)()
        (end,) = self.ended
        assert self._posted.empty()
        return end


@pytest.fixture
def held(self_model: LoadedModel) -> Iterator[Held]:
    held = Held(self_model)
    yield held
    held.finish()


def test_each_coroutine_gets_its_own_result(held: Held) -> None:
    callers = [held.ask(seed) for seed in range(3)]
    held.gate.open()
    for caller in [held.first, *callers]:
        result = caller.wait()
        assert isinstance(result, Result)
        assert_answers(caller.request, result)
    assert held.recorder.answered == [SELF] * 4
    assert held.engine.budget.held_bytes == 0


def test_a_coroutine_gets_the_error_of_its_request(self_model: LoadedModel) -> None:
    def fail(_: dict[str, Array]) -> None:
        raise RuntimeError(MESSAGE)

    recorder = Recorder()
    engine = Engine(Repository([self_model]), observer=recorder)
    request = validated_of(tapped(self_model, fail), [(2, 2)])
    with pytest.raises(RunFailedError):
        coroutines.run(engine.run(request, engine.budget.reserve(0)))
    engine.close()
    assert recorder.failed == [(SELF, "INTERNAL")]


def test_a_refusal_is_raised_and_reported_with_the_model(self_model: LoadedModel) -> None:
    recorder = Recorder()
    engine = Engine(Repository([self_model]), observer=recorder)
    engine.close()
    reservation = engine.budget.reserve(0)
    reservation.timeline = Timeline()
    with pytest.raises(EngineError, match="shutting down"):
        coroutines.run(engine.run(validated_of(self_model, [(2, 2)]), reservation))
    assert recorder.failed == [(SELF, "UNAVAILABLE")]
    assert (reservation.timeline.model, reservation.timeline.version) == (SELF, "1")


@pytest.mark.parametrize("place", ["queued", "running"])
def test_a_coroutine_that_is_closed_withdraws_its_request(held: Held, place: str) -> None:
    others = [held.ask(seed) for seed in range(2)]
    left = held.ask() if place == "queued" else held.first
    kept = [*others, held.first] if place == "queued" else others
    before = held.engine.budget.held_bytes
    left.task.close()
    assert held.engine.budget.held_bytes == before - left.request.form.held_bytes
    assert held.engine.load().queued_sequences == 2
    assert held.recorder.failed == [(SELF, "CANCELLED")]
    held.gate.open()
    for caller in kept:
        assert isinstance(caller.wait(), Result)
    left.task.resume()  # a message to the coroutine that was under way
    assert (left.ended, left.request.outcome) == ([], None)
    assert len(held.recorder.sizes) == len(kept) + (place == "running")


@pytest.mark.parametrize("place", [ExpiryStage.QUEUED, ExpiryStage.RUNNING])
def test_a_request_expires_at_a_deadline_of_its_own(held: Held, place: ExpiryStage) -> None:
    caller = held.ask() if place is ExpiryStage.QUEUED else held.first
    held.engine.expire(caller.request)
    assert isinstance(caller.wait(), DeadlineExceededError)
    held.engine.expire(caller.request)
    caller.task.close()
    assert held.recorder.failed == [(SELF, "DEADLINE_EXCEEDED")]
    assert held.recorder.stages == [place]
    assert held.engine.load().queued_sequences == 0


def test_a_deadline_that_passes_after_the_result_changes_nothing(held: Held) -> None:
    held.gate.open()
    result = held.first.wait()
    held.engine.expire(held.first.request)
    assert isinstance(result, Result)
    assert (held.recorder.failed, held.recorder.stages) == ([], [])


def test_whoever_waits_may_submit_and_withdraw_when_told(held: Held) -> None:
    """No lock is held, on whichever thread that is."""
    told: SimpleQueue[Future[Result]] = SimpleQueue()
    first, second = (submitted(held.engine, held.model, request_of(held.model, [(2, 2)])) for _ in range(2))

    def react(_: "Future[Result]") -> None:
        assert second.cancel()
        told.put(submitted(held.engine, held.model, request_of(held.model, [(3, 3)])))

    first.add_done_callback(react)
    held.gate.open()
    third = told.get(timeout=PATIENCE_SECONDS)
    assert_answers(validated_of(held.model, [(3, 3)]), third.result(PATIENCE_SECONDS))
    assert held.recorder.failed == [(SELF, "CANCELLED")]
