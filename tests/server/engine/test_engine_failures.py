"""Failed runs, cancelled requests, deadlines, overload and shutdown."""

import threading
import time
from contextlib import suppress

import pytest

from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.statistics import BatchReport, Observer
from attention_serving.server.engine.types import Array
from tests.server.samples import Sample, assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    PATIENCE_SECONDS,
    FailOnMarked,
    Held,
    Recorder,
    engine_of,
    mark,
    outcome,
    tapped,
    withdraw,
)


@pytest.mark.parametrize("position", [0, 1, 2], ids=["oldest", "middle", "youngest"])
def test_a_failing_run_fails_only_the_request_at_fault(self_model: LoadedModel, position: int) -> None:
    faults = FailOnMarked()
    with Held(self_model, faults) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
        faults.marks.add(mark(requests[position]))
    at_fault = requests.pop(position)
    with pytest.raises(RunFailedError) as caught:
        outcome(at_fault)
    assert MESSAGE not in str(caught.value)
    for request in requests:
        assert_answers(request, outcome(request))


def test_a_failing_graph_for_mixed_lengths_fails_no_request(cross_model: LoadedModel) -> None:
    def fail_with_lengths(inputs: dict[str, Array]) -> None:
        if "key_lengths" in inputs:
            raise RuntimeError(MESSAGE)

    with Held(cross_model, fail_with_lengths) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
    for request in requests:
        assert_answers(request, outcome(request))


def test_one_failing_sequence_fails_its_whole_request(self_model: LoadedModel) -> None:
    faults = FailOnMarked()
    with Held(self_model, faults) as held:
        broken = held.submit([(2, 2), (3, 3), (4, 4)], seed=1)
        good = held.submit([(2, 2), (3, 3)], seed=2)
        faults.marks.add(mark(broken, 1))
    with pytest.raises(RunFailedError):
        outcome(broken)
    assert_answers(good, outcome(good))


def test_requests_still_run_after_a_session_that_always_failed(self_model: LoadedModel) -> None:
    broken = threading.Event()

    def tap(_: dict[str, Array]) -> None:
        if broken.is_set():
            raise RuntimeError(MESSAGE)

    model = tapped(self_model, tap)
    engine = engine_of(Limits(), Recorder())
    broken.set()
    failed = [validated_of(model, [(2, 2), (3, 3)], seed=seed) for seed in range(3)]
    for request in failed:
        engine.submit(request)
    for request in failed:
        with pytest.raises(RunFailedError):
            outcome(request)
    broken.clear()
    later = validated_of(model, [(2, 2), (3, 3)])
    engine.submit(later)
    assert_answers(later, outcome(later))
    engine.close()


def test_a_cancelled_request_does_not_run(self_model: LoadedModel) -> None:
    with Held(self_model, max_batch_sequences=2) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(4)]
        for request in (requests[0], requests[2]):
            withdraw(held.engine, request)
    assert held.later_sizes == [2]
    for request in (requests[0], requests[2]):
        assert request.outcome is None
    assert_answers(requests[1], outcome(requests[1]))
    assert_answers(requests[3], outcome(requests[3]))


def test_an_expired_request_fails_without_running(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        head = held.submit([(2, 2)], deadline=time.monotonic())
        kept = held.submit([(2, 2)], seed=1)
        late = held.submit([(2, 2)], deadline=time.monotonic())
    assert held.later_sizes == [1]
    for request in (head, late):
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            outcome(request)
    assert_answers(kept, outcome(kept))


def test_close_completes_queued_requests_and_then_refuses(self_model: LoadedModel) -> None:
    with Held(self_model, max_batch_sequences=1) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
    for request in requests:
        assert request.outcome is not None
        assert_answers(request, outcome(request))
    with pytest.raises(ShuttingDownError, match="shutting down"):
        held.submit([(1, 1)])
    held.engine.close()


def test_requests_are_refused_while_accepted_ones_still_run(self_model: LoadedModel) -> None:
    accepted: list[Sample] = []
    with Held(self_model) as held:
        closing = threading.Thread(target=held.engine.close)
        closing.start()
        with suppress(ShuttingDownError):
            while closing.is_alive():
                accepted.append(held.submit([(2, 2)], seed=len(accepted)))
        assert not held.first.is_done
        assert closing.is_alive()
    closing.join(PATIENCE_SECONDS)
    for request in [held.first, *accepted]:
        assert_answers(request, outcome(request))


class FailsOnce(Observer):
    """An observer that fails at its first report."""

    def __init__(self) -> None:
        self._failed = False

    def batch_completed(self, report: BatchReport) -> None:
        if not self._failed:
            self._failed = True
            raise RuntimeError(report.model)


def test_a_failing_observer_does_not_change_results(self_model: LoadedModel) -> None:
    engine = engine_of(Limits(max_batch_sequences=2), FailsOnce())
    request = validated_of(self_model, [(2, 2), (3, 3), (4, 4)])
    engine.submit(request)
    result = outcome(request)
    engine.close()
    assert_answers(request, result)
