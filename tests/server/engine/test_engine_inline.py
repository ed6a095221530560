"""Inline runs: short batches on the caller's thread, everything else on the engine's."""

import math
from contextlib import closing
from dataclasses import replace
from threading import current_thread, main_thread

import pytest

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.schedule.queue import IDLE_FACTOR
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Gate, costing, engine_of, outcome, tapped

HERE = main_thread().name
THREAD = "scheduler"
ANY_RUN = math.inf


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another run"])
@pytest.mark.parametrize("kind", ["short", "long", "on a device"])
def test_a_long_batch_is_handed_to_a_thread(self_model: LoadedModel, kind: str, beside: bool) -> None:
    threads, gate, stays = list[str](), Gate(), kind == "short"
    provider = (Provider.CUDA if kind == "on a device" else Provider.CPU).runtime.name
    model = tapped(costing(self_model, SAME_FOR_ALL), lambda _: threads.append(current_thread().name))
    model = replace(model, provider=provider)
    limit_seconds = (0.9 if kind == "long" else 1.0) / (1 if beside else IDLE_FACTOR)
    with closing(engine_of(parallel_runs=2)) as engine:
        if beside:
            engine.submit(validated_of(tapped(self_model, gate), [(2, 2)]))
            assert gate.entered.wait(PATIENCE_SECONDS)
        requests = [validated_of(model, [(length, length)], seed=length) for length in (3, 4)]
        for request in requests:
            engine.submit(request, wake=False)
        assert not any(request.is_done for request in requests)
        assert engine.run_inline(limit_seconds) == stays
        for request in requests:
            assert_answers(request, outcome(request))
        gate.open()
    assert threads == [HERE if stays else THREAD]


def test_the_caller_stays_awake_after_a_run_unless_a_thread_runs(self_model: LoadedModel) -> None:
    gate = Gate()
    with closing(engine_of(spin_seconds=1e-9)) as engine:
        engine.submit(validated_of(self_model, [(3, 3)]), wake=False)
        assert engine.run_inline(ANY_RUN)
        assert not engine.run_inline(ANY_RUN)
    with closing(engine_of(spin_seconds=PATIENCE_SECONDS, parallel_runs=1)) as engine:
        assert not engine.run_inline(ANY_RUN)
        engine.submit(validated_of(self_model, [(3, 3)]), wake=False)
        for _ in range(3):
            assert engine.run_inline(ANY_RUN)
        engine.submit(validated_of(tapped(self_model, gate), [(2, 2)]))
        assert gate.entered.wait(PATIENCE_SECONDS)
        assert not engine.run_inline(ANY_RUN)
        gate.open()
