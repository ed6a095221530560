"""How a request ends for whoever awaits it, and what the engine reports of it."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import pytest

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, ShuttingDownError
from attention_serving.server.engine.events import (
    EventLog,
    ExpiryStage,
    FailureEvent,
    ModelStatistics,
    Timeline,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import RUNTIME_PROVIDERS, Device, Provider
from attention_serving.server.engine.types import MaskKind, Result
from tests.server.samples import CROSS, SELF, assert_answers, request_of, validated_of
from tests.server.seams import (
    PATIENCE_SECONDS,
    Gate,
    Held,
    Recorder,
    engine_of,
    on_device,
    outcome,
    tapped,
    withdraw,
)
from tests.support import coroutines
from tests.support.coroutines import submitted


@pytest.fixture
def held(self_model: LoadedModel) -> Iterator[Held]:
    with Held(self_model, max_batch_sequences=1) as held:
        yield held


def ask(held: Held, seed: int) -> "Future[Result]":
    return submitted(held.engine, held.model, request_of(held.model, [(2, 2)], seed=seed))


def test_each_coroutine_gets_its_own_result_and_holds_memory_until_then(held: Held) -> None:
    futures = [ask(held, seed) for seed in range(3)]
    plan = validated_of(held.model, [(2, 2)]).plan
    assert held.engine.budget.held_bytes == 3 * (
        2 * 4 * 4 + plan.required_bytes
    )  # 2 rows of 4 floats are sent
    held.gate.open()
    for seed, future in enumerate(futures):
        assert_answers(validated_of(held.model, [(2, 2)], seed=seed), future.result(PATIENCE_SECONDS))
    assert held.recorder.answered == [SELF] * 4
    assert held.engine.budget.held_bytes == 0


def test_a_refusal_is_raised_and_reported_with_the_model(self_model: LoadedModel) -> None:
    recorder = Recorder()
    engine = Engine(Repository([self_model]), events=recorder)
    engine.close()
    reservation = Reservation(engine.budget, timeline=Timeline())
    with pytest.raises(ShuttingDownError, match="shutting down"):
        coroutines.run(engine.submit_and_wait(validated_of(self_model, [(2, 2)]), reservation))
    assert recorder.failed == [(SELF, "UNAVAILABLE")]
    timeline = reservation.timeline
    assert timeline is not None
    assert (timeline.model, timeline.version, timeline.queued_at) == (SELF, "1", 0.0)


@pytest.mark.parametrize("place", ["queued", "running"])
def test_a_coroutine_that_is_closed_withdraws_its_request(self_model: LoadedModel, place: str) -> None:
    gate, recorder = Gate(), Recorder()
    engine = engine_of(Limits(max_batch_sequences=1), recorder, parallel_runs=1)
    request = request_of(self_model, [(2, 2)])
    running = submitted(engine, tapped(self_model, gate), request)
    assert gate.entered.wait(PATIENCE_SECONDS)
    queued = submitted(engine, self_model, request)
    left, kept = (queued, running) if place == "queued" else (running, queued)
    before = engine.budget.held_bytes
    assert left.cancel()
    assert engine.budget.held_bytes == before // 2
    assert engine.load().queue_depth == (place == "running")
    assert recorder.failed == [(SELF, "CANCELLED")]
    gate.open()
    assert_answers(validated_of(self_model, [(2, 2)]), kept.result(PATIENCE_SECONDS))
    engine.close()
    assert len(recorder.sizes) == 1 + (place == "running")


@pytest.mark.parametrize("place", ExpiryStage)
def test_a_request_expires_once_at_a_deadline_of_its_own(held: Held, place: ExpiryStage) -> None:
    request = held.submit([(2, 2)]) if place is ExpiryStage.QUEUED else held.first
    for _ in range(2):
        held.engine.fail(request, DeadlineExceededError("late"))
    with pytest.raises(DeadlineExceededError):
        outcome(request)
    assert held.recorder.failed == [(SELF, "DEADLINE_EXCEEDED")]
    stages = [event.stage for event in held.recorder.all if isinstance(event, FailureEvent)]
    assert stages == [place]
    assert held.engine.load().queue_depth == 0


def test_whoever_waits_may_submit_and_withdraw_when_told(held: Held) -> None:
    """No lock is held, on whichever thread that is."""
    told: SimpleQueue[Future[Result]] = SimpleQueue()
    first, second = ask(held, 0), ask(held, 0)

    def react(_: "Future[Result]") -> None:
        assert second.cancel()
        told.put(ask(held, 3))

    first.add_done_callback(react)
    held.gate.open()
    third = told.get(timeout=PATIENCE_SECONDS)
    assert_answers(validated_of(held.model, [(2, 2)], seed=3), third.result(PATIENCE_SECONDS))
    assert held.recorder.failed == [(SELF, "CANCELLED")]


def test_a_run_of_several_requests_counts_rows_and_padding(cross_model: LoadedModel) -> None:
    with Held(cross_model) as held:
        requests = [held.submit([(2, 3)]), held.submit([(4, 1)], seed=1)]
    (_, run) = held.recorder.runs
    assert (run.model, run.sequences, run.rows, run.padding) == (CROSS, 2, 10, 2 * (4 + 3) - 10)
    assert (len(run.queue_seconds), len(run.latencies)) == (2, 2)
    assert min(run.queue_seconds) > 0
    assert run.seconds > 0
    for request in requests:
        assert_answers(request, outcome(request))


def test_events_that_cannot_be_counted_change_nothing(self_model: LoadedModel) -> None:
    def fail(_: object) -> None:
        raise RuntimeError

    model, counted = dataclasses.replace(self_model, statistics=ModelStatistics()), list[object]()
    engine = engine_of(events=EventLog(fail, counted.extend))
    request = validated_of(model, [(2, 2), (3, 3)])
    engine.submit(request)
    assert_answers(request, outcome(request))
    engine.close()
    engine.events.flush()
    assert len(counted) == len(model.statistics.runs) == 1


def test_requests_runs_and_failures_are_counted(self_model: LoadedModel) -> None:
    started = time.time()
    with Held(dataclasses.replace(self_model, statistics=ModelStatistics()), max_batch_sequences=3) as held:
        held.submit([(2, 2)] * 4)
        withdraw(held.engine, held.submit([(2, 2)]))
        late = held.submit([(2, 2)], deadline=time.monotonic())
    held.engine.events.flush()
    found = held.model.statistics
    assert isinstance(late.outcome, DeadlineExceededError)
    assert (found.succeeded.count, found.failed.count, found.queued.count) == (2, 2, 5)
    assert {size: runs.count for size, runs in found.runs.items()} == {3: 1, 1: 2}
    computed = sum(runs.compute for runs in found.runs.values())
    assert 0 < computed <= found.succeeded.seconds
    assert found.failed.seconds > 0
    assert started <= found.last_run <= time.time()


def test_padded_runs_answer_as_eager_and_their_padding_is_counted(cross_model: LoadedModel) -> None:
    with Held(on_device(cross_model)) as held:
        request = held.submit([(3, 5), (2, 6), (1, 1)], kind=MaskKind.PAIRS)
        alone = held.submit([(2, 3)], return_weights=True)
    for each in (request, alone):
        assert_answers(each, outcome(each))
    # Rows of queries and keys; 6 and 3 keys become 8. The first run is on a graph without a mask.
    padding = [(run.rows, run.padding) for run in held.recorder.runs]
    assert padding == [(2, 0), (18, 3 * (3 + 8) - 18), (5, 5)]


def test_a_model_is_padded_as_its_provider_needs(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = dataclasses.replace(Provider.CPU.runtime, row_multiple=8)
    monkeypatch.setitem(RUNTIME_PROVIDERS, Provider.CPU, needs)
    assert load_model(artifacts / SELF / "1", Device(threads=1)).row_multiple == 8
