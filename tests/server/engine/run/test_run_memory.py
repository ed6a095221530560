"""The memory of a run: measured, bounded by the arena, and refused if it can never fit."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.errors import LimitExceededError, OverloadedError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.run_memory import peak_bytes
from attention_serving.server.engine.run.session import RunControl
from attention_serving.server.engine.types import Array
from tests.server.samples import ROOT, request_of, validated_of
from tests.server.seams import PATIENCE_SECONDS, Gate, Recorder, engine_of, outcome, tapped, withdraw

SIZE = 64 * MIB
# A run beyond the arena's limit, in a process of its own because the arena belongs to the process.
BEYOND_THE_ARENA = """
import sys
from pathlib import Path
import numpy as np
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device
model = load_model(Path(sys.argv[1]), Device(threads=1, arena_bytes=8 << 20))
query = np.ones((1, 4096, 4), np.float32)
try:
    model.sessions["plain"].run({"query": query})
except MemoryError:
    print("refused")
print(model.sessions["plain"].run({"query": query[:, :8]})["context_vectors"].shape)
"""


def test_the_peak_of_a_run_is_measured() -> None:
    measured = peak_bytes(lambda: np.ones(SIZE, np.int8).sum())
    assert measured is not None
    # Other threads of the tests may return memory meanwhile.
    assert SIZE // 2 <= measured < 2 * SIZE


def test_a_run_beyond_the_arena_fails_and_the_next_one_succeeds(
    artifacts: Path, self_model: LoadedModel
) -> None:
    folder = artifacts / self_model.name / self_model.version
    command = [sys.executable, "-c", BEYOND_THE_ARENA, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout.decode().splitlines() == ["refused", "(1, 8, 4)"]


def test_a_sequence_whose_run_can_never_fit_is_refused(self_model: LoadedModel) -> None:
    limit = self_model.run_bytes(GraphKind.PLAIN, 1, 5, 5)
    limits = Limits(max_run_bytes=limit)
    validate(request_of(self_model, [(5, 5)] * 9), self_model, limits)
    with pytest.raises(LimitExceededError, match=rf"sequence 2 needs about \d+ bytes .* limit is {limit};"):
        validate(request_of(self_model, [(5, 5), (2, 2), (6, 6)]), self_model, limits)


def test_runs_that_do_not_fit_together_run_one_after_the_other(self_model: LoadedModel) -> None:
    gate = Gate()
    model = tapped(self_model, gate)
    limits = Limits(max_run_bytes=int(1.5 * model.run_bytes(GraphKind.PLAIN, 1, 9, 9)))
    recorder = Recorder()
    engine = engine_of(limits, recorder, parallel_runs=2)
    first, second = (validated_of(model, [(9, 9)], seed=seed) for seed in range(2))
    engine.submit(first)
    assert gate.entered.wait(PATIENCE_SECONDS)
    engine.submit(second)
    load = engine.load()
    assert (load.running, load.queued_sequences) == (1, 1)
    assert 0 < load.run_bytes <= limits.max_run_bytes
    gate.open()
    for request in (first, second):
        outcome(request)
    engine.close()
    assert recorder.sizes == [1, 1]


def test_a_run_out_of_memory_is_refused_as_overload(self_model: LoadedModel) -> None:
    def fail(_: dict[str, Array]) -> None:
        raise MemoryError

    engine = engine_of(Limits(), Recorder())
    request = validated_of(tapped(self_model, fail), [(2, 2)])
    engine.submit(request)
    with pytest.raises(OverloadedError, match="more memory"):
        outcome(request)
    engine.close()


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


def test_onnx_runtime_ends_a_run_that_is_terminated(self_model: LoadedModel) -> None:
    control = RunControl()
    query = np.ones((1, 2, 4), np.float32)
    session = self_model.sessions[GraphKind.PLAIN]
    assert session.run({"query": query}, control)["context_vectors"].shape == (1, 2, 4)
    control.terminate()
    with pytest.raises(Exception, match="terminate flag"):
        session.run({"query": query}, control)
