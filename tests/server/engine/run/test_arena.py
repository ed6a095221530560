"""Memory of a burst of large runs is returned to the system after the burst, not during it."""

import os
import subprocess
import sys
from pathlib import Path

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.run_memory import IDLE_SECONDS, LARGE_RUN_BYTES, ArenaTrimmer
from tests.server.samples import ROOT


def test_small_runs_do_not_trim(self_model: LoadedModel) -> None:
    trimmer = ArenaTrimmer()
    trimmer.note_run(self_model, LARGE_RUN_BYTES - 1, 0.0)
    assert trimmer.wait_seconds is None
    assert trimmer.due(2 * IDLE_SECONDS) is None


def test_the_arena_is_trimmed_once_after_the_last_large_run(self_model: LoadedModel) -> None:
    trimmer = ArenaTrimmer()
    trimmer.note_run(self_model, LARGE_RUN_BYTES, 0.0)
    trimmer.note_run(self_model, LARGE_RUN_BYTES, 1.0)
    trimmer.note_run(self_model, 1, 2.0)
    assert trimmer.wait_seconds == IDLE_SECONDS
    assert trimmer.due(IDLE_SECONDS + 0.9) is None
    assert trimmer.due(IDLE_SECONDS + 1) is self_model
    assert trimmer.due(IDLE_SECONDS + 1) is None
    assert trimmer.wait_seconds is None


PROGRAM = """
import resource, sys, time
from pathlib import Path
import numpy as np
from attention_serving.server.engine.run import run_memory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request
from tests.support.coroutines import submitted

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

run_memory.IDLE_SECONDS = 0.5
store = ModelStore(Path(sys.argv[1]), Device(threads=1))
engine = Engine(Repository([store.load("tiny-self", "1")]))
rows = Ragged(np.ones((4096, 4), np.float32), (4096,))
request = Request(inputs={"query": rows})
before = resident()
submitted(engine, engine.model("tiny-self"), request).result()
held, until = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.monotonic() + 30
while resident() > (before + held) / 2 and time.monotonic() < until:
    time.sleep(0.05)
print(held - before, resident() - before)
engine.close()
"""


def test_an_idle_engine_does_not_hold_the_memory_of_a_burst(artifacts: Path) -> None:
    """One sequence of 4,096 rows and two heads needs 128 MiB for its scores."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(artifacts)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    held, left = map(int, result.stdout.split())
    assert held > 100 << 20
    assert left < held / 4
