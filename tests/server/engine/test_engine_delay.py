"""The batching delay: how long the oldest sequence waits, and what ends the wait early."""

import math
from collections.abc import Iterator

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import SAME_FOR_ALL, Recorder, Threads, costing, engine_of, outcome, tapped

BRIEF, AGES = 0.05, 3600.0
FULL = 2


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return costing(self_model, SAME_FOR_ALL)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def patient(recorder: Recorder) -> Iterator[Engine]:
    """A engine with a very long batching delay."""
    engine = engine_of(Limits(batch_delay_seconds=AGES, max_batch_sequences=FULL), recorder)
    yield engine
    engine.close()


@pytest.mark.parametrize("wake", [True, False], ids=["thread", "inline"])
def test_the_oldest_runs_after_the_delay(model: LoadedModel, recorder: Recorder, wake: bool) -> None:
    engine = engine_of(Limits(batch_delay_seconds=BRIEF), recorder)
    threads = Threads()
    request = validated_of(tapped(model, threads), [(3, 3)])
    engine.submit(request, wake=wake)
    if not wake:
        assert not engine.run_inline(math.inf)
    assert_answers(request, outcome(request))
    engine.close()
    assert recorder.runs[0].queue_seconds[0] >= BRIEF
    assert threads.names == ["scheduler"]


def test_a_sequence_that_arrives_within_the_delay_joins_the_oldest(
    model: LoadedModel, patient: Engine, recorder: Recorder
) -> None:
    requests = [validated_of(model, [(length, length)], seed=length) for length in (3, 4)]
    patient.submit(requests[0])
    assert not requests[0].is_done
    patient.submit(requests[1])
    for request in requests:
        assert_answers(request, outcome(request))
    assert recorder.sizes == [FULL]


def test_a_full_batch_does_not_wait(model: LoadedModel, patient: Engine) -> None:
    threads = Threads()
    request = validated_of(tapped(model, threads), [(3, 3)] * FULL)
    patient.submit(request, wake=False)
    assert patient.run_inline(math.inf)
    assert_answers(request, outcome(request))
    assert len(threads.names) == 1


def test_closing_ends_the_delay(model: LoadedModel, recorder: Recorder) -> None:
    engine = engine_of(Limits(batch_delay_seconds=AGES), recorder)
    request = validated_of(model, [(3, 3)])
    engine.submit(request)
    assert not request.is_done
    engine.close()
    assert request.outcome is not None
    assert_answers(request, outcome(request))
