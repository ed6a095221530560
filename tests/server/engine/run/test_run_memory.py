"""The memory of a run: measured, bounded by the arena, and refused if it can never fit."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import engine as engines
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.calibration import peak_bytes
from tests.server.samples import ROOT, request_of, validated_of
from tests.server.seams import (
    PATIENCE_SECONDS,
    Gate,
    Recorder,
    engine_of,
    outcome,
    tapped,
    wait_until,
    withdraw,
)

SIZE = 64 * MIB
# The arena belongs to the process.
ARENA = """
import sys
from pathlib import Path
import numpy as np
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def run(rows):
    return model.sessions["plain"].run({"query": np.ones((1, rows, 4), np.float32)})["context_vectors"].shape

model = load_model(Path(sys.argv[1]), Device(threads=1, arena_bytes=400 << 20))
before = resident()
print(run(4096), resident() - before > 100)
model.shrink_arena()
print(resident() - before < 40)
try:
    run(8192)
except MemoryError:
    print("refused")
print(run(8))
"""


def test_the_peak_of_a_run_is_measured() -> None:
    measured = peak_bytes(lambda: np.ones(SIZE, np.int8).sum())
    assert measured is not None
    # Other threads of the tests may return memory meanwhile.
    assert SIZE // 2 <= measured < 2 * SIZE


@pytest.mark.thorough
def test_the_arena_is_bounded_and_gives_memory_back(artifacts: Path, self_model: LoadedModel) -> None:
    """The scores of one sequence of 4,096 rows and two heads take 128 MiB."""
    folder = artifacts / self_model.name / self_model.version
    command = [sys.executable, "-c", ARENA, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout.decode().splitlines() == ["(1, 4096, 4) True", "True", "refused", "(1, 8, 4)"]


def test_a_sequence_whose_run_can_never_fit_is_refused(self_model: LoadedModel) -> None:
    limit = self_model.run_bytes(GraphKind.PLAIN, 1, 5, 5)
    limits = Limits(max_run_bytes=limit)
    validate(request_of(self_model, [(5, 5)] * 9), self_model, limits)
    with pytest.raises(LimitExceededError, match=rf"sequence 2 needs about \d+ bytes .* limit is {limit};"):
        validate(request_of(self_model, [(5, 5), (2, 2), (6, 6)]), self_model, limits)


def test_the_arena_is_trimmed_once_after_the_last_large_run(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []

    class Noted(LoadedModel):
        def shrink_arena(self) -> None:
            trimmed.append(1)

    size = self_model.run_bytes(GraphKind.PLAIN, 1, 5, 5)
    monkeypatch.setattr(engines, "LARGE_RUN_BYTES", size)
    monkeypatch.setattr(engines, "TRIM_SECONDS", 0.1)
    model = Noted(**{field.name: getattr(self_model, field.name) for field in dataclasses.fields(self_model)})
    engine = engine_of()
    for length in (5, 5, 4):
        request = validated_of(model, [(length, length)])
        engine.submit(request)
        outcome(request)
    assert trimmed == []
    wait_until(lambda: trimmed)
    request = validated_of(model, [(4, 4)])
    engine.submit(request)
    outcome(request)
    assert engine._large is None
    engine.close()
    assert trimmed == [1]


class TerminationRecorder(Recorder):
    """Says when a run was ended early."""

    def __init__(self) -> None:
        super().__init__()
        self.terminated = threading.Event()

    def run_terminated(self, model: str) -> None:
        super().run_terminated(model)
        self.terminated.set()


@pytest.mark.parametrize("abandoned", [True, False], ids=["all callers left", "one caller waits"])
def test_a_run_is_ended_once_all_of_its_callers_have_left(
    self_model: LoadedModel, *, abandoned: bool
) -> None:
    """The runtime itself ends the run: it is asked to before the gate lets the run begin."""
    gate, recorder = Gate(), TerminationRecorder()
    slow = {kind: dataclasses.replace(cost, call=1.0) for kind, cost in self_model.costs.items()}
    model = dataclasses.replace(tapped(self_model, gate), costs=slow)
    engine = engine_of(Limits(), recorder, parallel_runs=1)
    first = validated_of(dataclasses.replace(model), [(1, 1)])
    engine.submit(first)
    assert gate.entered.wait(PATIENCE_SECONDS)
    withdraw(engine, first)
    requests = [validated_of(model, [(3, 3)], seed=seed) for seed in range(2)]
    for request in requests:
        engine.submit(request)
    left = requests if abandoned else requests[:1]
    for request in left:
        withdraw(engine, request)
    gate.open()
    assert recorder.terminated.wait(PATIENCE_SECONDS)
    if not abandoned:
        outcome(requests[1])
    engine.close()
    assert recorder.sizes == ([] if abandoned else [1])
