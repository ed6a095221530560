"""Many callers at once: each request ends as it must."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import Code, DeadlineExceededError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import MaskKind
from tests.server.samples import Sample, assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    PATIENCE_SECONDS,
    FailOnMarked,
    Recorder,
    engine_of,
    mark,
    outcome,
    tapped,
)

CALLERS, PER_CALLER = 4, 40
LIMITS = Limits(max_batch_sequences=5)
# What is expected of a run, by chance, is below or above this.
LIMIT_SECONDS = (0.0, math.inf)
FATES = ("answered", "answered", "answered", "cancelled", "expired", "failed")


@dataclass(eq=False)
class Caller:
    """Submits requests, runs inline or wakes a thread, and cancels some."""

    engine: Engine
    models: list[LoadedModel]
    faults: FailOnMarked
    seed: int
    fates: list[tuple[Sample, str]] = field(default_factory=list)

    def __call__(self, together: threading.Barrier) -> None:
        rng = np.random.default_rng(self.seed)
        requests = [self._work(rng, number) for number in range(PER_CALLER)]
        together.wait(PATIENCE_SECONDS)
        for request, fate in requests:
            wake = bool(rng.integers(2))
            self.engine.submit(request, wake=wake)
            if fate == "cancelled":
                self.engine.fail(request, None)
                assert request.is_done
            self.fates.append((request, fate))
            limit = LIMIT_SECONDS[rng.integers(2)]
            while not wake and self.engine.run_inline(limit):
                pass

    def _work(self, rng: np.random.Generator, number: int) -> tuple[Sample, str]:
        fate = FATES[rng.integers(len(FATES))]
        lengths = [(int(pair[0]), int(pair[1])) for pair in rng.integers(1, 9, (rng.integers(1, 5), 2))]
        if not rng.integers(4):
            lengths.append((60, 60))
        request = validated_of(
            self.models[rng.integers(len(self.models))],
            lengths,
            seed=1000 * self.seed + number,
            kind=(None, None, *MaskKind)[rng.integers(5)],
            return_weights=bool(rng.integers(2)),
            deadline=time.monotonic() if fate == "expired" else math.inf,
        )
        if fate == "failed":
            self.faults.marks.add(mark(request, int(rng.integers(len(lengths)))))
        return request, fate


def check(request: Sample, fate: str) -> None:
    """A request ended as its fate was."""
    errors = {"expired": DeadlineExceededError, "failed": RunFailedError}
    if fate in errors:
        with pytest.raises(errors[fate]) as caught:
            outcome(request)
        assert MESSAGE not in str(caught.value)
    else:
        assert_answers(request, outcome(request))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_caller_gets_its_own_answers(
    self_model: LoadedModel, cross_model: LoadedModel, seed: int
) -> None:
    faults, recorder = FailOnMarked(), Recorder()
    models = [tapped(model, faults) for model in (self_model, cross_model)]
    engine = engine_of(LIMITS, recorder)
    callers = [Caller(engine, models, faults, CALLERS * seed + number) for number in range(CALLERS)]
    together = threading.Barrier(CALLERS)
    with ThreadPoolExecutor(CALLERS) as pool:
        for started in [pool.submit(caller, together) for caller in callers]:
            started.result(PATIENCE_SECONDS)
    fates = [pair for caller in callers for pair in caller.fates]
    left = [request for request, fate in fates if fate == "cancelled"]
    for request, fate in fates:
        if request not in left:
            check(request, fate)
    engine.close()
    answered = [request for request in left if request.outcome is not None]
    for request in answered:
        check(request, "answered")
    cancelled = len(left) - len(answered)
    assert cancelled > 0
    assert [code for _, code in recorder.failed].count(Code.CANCELLED) == cancelled
    assert {fate for _, fate in fates} == set(FATES)
    assert len(fates) == CALLERS * PER_CALLER
    assert max(recorder.sizes) <= LIMITS.max_batch_sequences
