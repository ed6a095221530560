"""Memory that large runs leave behind is given back when they are over, and not between them."""

import os
import subprocess
import sys
from pathlib import Path

from server.engine.arena import LARGE_BYTES, REST_SECONDS, Burst
from server.engine.model import LoadedModel
from tests.server.samples import ROOT


def test_small_runs_leave_nothing_to_give_back(self_model: LoadedModel) -> None:
    burst = Burst()
    burst.note(self_model, LARGE_BYTES - 1, 0.0)
    assert burst.wait_seconds is None
    assert burst.over(2 * REST_SECONDS) is None


def test_memory_is_given_back_once_some_time_after_the_last_large_run(self_model: LoadedModel) -> None:
    burst = Burst()
    burst.note(self_model, LARGE_BYTES, 0.0)
    burst.note(self_model, LARGE_BYTES, 1.0)
    burst.note(self_model, 1, 2.0)
    assert burst.wait_seconds == REST_SECONDS
    assert burst.over(REST_SECONDS + 0.9) is None
    assert burst.over(REST_SECONDS + 1) is self_model
    assert burst.over(REST_SECONDS + 1) is None
    assert burst.wait_seconds is None


IN_A_PROCESS_OF_ITS_OWN = """
import sys, time
from pathlib import Path
import numpy as np
from server.engine import arena
from server.engine.engine import Engine
from server.engine.repository import load_repository
from server.engine.session import Device
from server.engine.types import Ragged, Request

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

arena.REST_SECONDS = 0.5
engine = Engine(load_repository(Path(sys.argv[1]), Device(threads=1)))
rows = Ragged(np.ones((4096, 4), np.float32), (4096,))
request = Request(inputs={"query": rows})
before = resident()
engine.submit(engine.model("tiny-self"), request).result()
held, until = resident(), time.monotonic() + 30
while resident() > (before + held) / 2 and time.monotonic() < until:
    time.sleep(0.05)
print(held - before, resident() - before)
engine.close()
"""


def test_an_engine_that_rests_holds_no_more_than_before_the_burst(artifacts: Path) -> None:
    """One sequence of 4,096 rows and two heads needs 128 MiB for its scores."""
    result = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, str(artifacts)],
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
