"""How a request ends for the coroutine that awaits it, and what the engine reports of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

import pytest

from attention_serving.server.coroutines import Callback, Task
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, EngineError, ShuttingDownError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.statistics import BatchReport, ExpiryStage, Timeline
from attention_serving.server.engine.types import Result
from tests.server import seams
from tests.server.samples import CROSS, SELF, Sample, assert_answers, request_of, validated_of
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Gate, Recorder, engine_of, outcome, tapped
from tests.support import coroutines
from tests.support.coroutines import submitted

RESERVED = 100


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
        limits = Limits(max_batch_sequences=1)
        self.engine = Engine(Repository([model]), limits, self.recorder, parallel_runs=1)
        self.first = Caller(self.engine, validated_of(tapped(model, self.gate), [(1, 1)]))
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def ask(self, seed: int = 0) -> "Caller":
        return Caller(self.engine, validated_of(self.model, [(2, 2)], seed=seed))


class Caller:
    """A coroutine that awaits a result, and is driven by the thread of the test."""

    def __init__(self, engine: Engine, request: Sample) -> None:
        self.request = request
        self.ended: list[Result | EngineError] = []
        self._posted: SimpleQueue[Callback] = SimpleQueue()
        self.task = Task(self._work(engine), self._posted.put)
        self.task.resume()

    async def _work(self, engine: Engine) -> None:
        reservation = engine.budget.reserve(RESERVED)
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
    held.gate.open()
    held.engine.close()


def test_each_coroutine_gets_its_own_result_and_holds_memory_until_then(held: Held) -> None:
    callers = [held.first, *(held.ask(seed) for seed in range(3))]
    held_bytes = sum(RESERVED + caller.request.form.held_bytes for caller in callers)
    assert held.engine.budget.held_bytes == held_bytes
    held.gate.open()
    for caller in callers:
        result = caller.wait()
        assert isinstance(result, Result)
        assert_answers(caller.request, result)
    assert held.recorder.answered == [SELF] * 4
    assert held.engine.budget.held_bytes == 0


def test_a_refusal_is_raised_and_reported_with_the_model(self_model: LoadedModel) -> None:
    recorder = Recorder()
    engine = Engine(Repository([self_model]), observer=recorder)
    engine.close()
    reservation = engine.budget.reserve(0)
    reservation.timeline = Timeline()
    with pytest.raises(ShuttingDownError, match="shutting down"):
        coroutines.run(engine.run(validated_of(self_model, [(2, 2)]), reservation))
    assert recorder.failed == [(SELF, "UNAVAILABLE")]
    timeline = reservation.timeline
    assert (timeline.model, timeline.version, timeline.queued_at) == (SELF, "1", 0.0)


@pytest.mark.parametrize("place", ["queued", "running"])
def test_a_coroutine_that_is_closed_withdraws_its_request(held: Held, place: str) -> None:
    others = [held.ask(seed) for seed in range(2)]
    left = held.ask() if place == "queued" else held.first
    kept = [*others, held.first] if place == "queued" else others
    before = held.engine.budget.held_bytes
    left.task.close()
    assert held.engine.budget.held_bytes == before - left.request.form.held_bytes - RESERVED
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
    for _ in range(2):
        held.engine.fail(caller.request, DeadlineExceededError("late"))
    assert isinstance(caller.wait(), DeadlineExceededError)
    caller.task.close()
    assert held.recorder.failed == [(SELF, "DEADLINE_EXCEEDED")]
    assert held.recorder.stages == [place]
    assert held.engine.load().queued_sequences == 0


def test_a_deadline_that_passes_after_the_result_changes_nothing(held: Held) -> None:
    held.gate.open()
    result = held.first.wait()
    held.engine.fail(held.first.request, DeadlineExceededError("late"))
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


def test_requests_that_wait_run_together_and_the_report_counts_rows_and_padding(
    cross_model: LoadedModel,
) -> None:
    with seams.Held(cross_model) as held:
        requests = [held.submit([(2, 3)]), held.submit([(4, 1)], seed=1)]
    (_, run) = held.recorder.runs
    assert (run.model, run.sequences, run.tokens, run.padding) == (CROSS, 2, 10, 2 * (4 + 3) - 10)
    assert (len(run.queue_seconds), len(run.answered)) == (2, 2)
    assert min(run.queue_seconds) > 0
    assert run.seconds > 0
    for request in requests:
        assert_answers(request, outcome(request))


def test_as_many_runs_are_under_way_as_are_allowed(self_model: LoadedModel) -> None:
    gates = [Gate() for _ in range(3)]
    requests = [validated_of(tapped(self_model, gate), [(2, 2)], seed=at) for at, gate in enumerate(gates)]
    engine = engine_of(Limits(max_batch_sequences=1), parallel_runs=2)
    for request in requests:
        engine.submit(request)
    assert gates[0].entered.wait(PATIENCE_SECONDS)
    assert gates[1].entered.wait(PATIENCE_SECONDS)
    assert (engine.load().running, engine.load().queued_sequences) == (2, 1)
    gates[1].open()
    assert gates[2].entered.wait(PATIENCE_SECONDS)
    assert not requests[0].is_done
    for gate in gates:
        gate.open()
    for request in requests:
        assert_answers(request, outcome(request))
    engine.close()


def drained(held: seams.Held) -> list[Sample]:
    """Closes the engine while its first run is held; returns what it accepted meanwhile."""
    accepted = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
    closing = threading.Thread(target=held.engine.close)
    closing.start()
    with suppress(ShuttingDownError):
        while closing.is_alive():
            accepted.append(held.submit([(2, 2)], seed=len(accepted)))
    assert closing.is_alive()
    assert not held.first.is_done
    held.gate.open()
    closing.join(PATIENCE_SECONDS)
    return [held.first, *accepted]


def test_closing_completes_what_was_accepted_and_refuses_the_rest(self_model: LoadedModel) -> None:
    with seams.Held(self_model, max_batch_sequences=1) as held:
        for request in drained(held):
            assert_answers(request, outcome(request))


class Broken(Recorder):
    """An observer that fails at every report."""

    def batch_completed(self, report: BatchReport) -> None:
        raise RuntimeError(report.model)

    def request_failed(self, model: str, code: str) -> None:
        raise RuntimeError(model, code)


def test_a_failing_observer_changes_neither_results_nor_errors(self_model: LoadedModel) -> None:
    with seams.Held(self_model, cost=SAME_FOR_ALL) as held:
        held.engine._observer = Broken()
        request, left = held.submit([(2, 2), (3, 3)]), held.submit([(1, 1)])
        seams.withdraw(held.engine, left)
    assert_answers(request, outcome(request))
