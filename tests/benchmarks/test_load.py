"""The load generator and the processes of a run, against a real echo server."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import run
from benchmarks.load import Endpoint, MeasurementWindow, closed_loop, open_loop, poisson
from benchmarks.processes import ServerAddress, is_running, process_tree, running
from benchmarks.wire import Api
from benchmarks.workload import NARROW, SHORT

WINDOW = MeasurementWindow(seconds=0.05, warm_seconds=0.01)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddress]:
    """The echo, ready."""
    with run.echo(tmp_path_factory.mktemp("echo")) as server:
        yield server
    assert not is_running(server.pid)


def endpoint(echo: ServerAddress) -> Endpoint:
    return Endpoint(echo.address, echo.pid, Api.ECHO, NARROW, SHORT)


def test_closed_loop_counts_what_was_answered(echo: ServerAddress) -> None:
    result = closed_loop(endpoint(echo), 4, WINDOW)
    assert result.failures == 0
    assert result.seconds >= WINDOW.seconds
    assert len(result.latencies) == result.sequences >= 2 * 4
    assert result.tokens == result.sequences * SHORT.longest
    assert np.all(result.latencies > 0)


def test_open_loop_sends_every_request_that_is_due(echo: ServerAddress) -> None:
    result = open_loop(endpoint(echo), rate=200, seconds=0.1, seed=1)
    assert result.failures == 0
    assert result.sequences == len(result.latencies) == 20


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    due = poisson(1000, 20, seed=3)
    assert np.array_equal(due, poisson(1000, 20, seed=3))
    assert len(due) == 20_000
    assert 0 <= due[0] <= due[-1] < 20e9
    # Exponential gaps have a standard deviation equal to their mean.
    assert np.isclose(np.diff(due).std(), 1e6, rtol=0.05)


@pytest.mark.timeout(30)
def test_a_stopped_process_leaves_no_children(tmp_path: Path) -> None:
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    with running([sys.executable, "-c", script], tmp_path / "log", os.environ) as process:
        while len(tree := process_tree(process.pid)) < 2:
            assert process.poll() is None
    while any(is_running(pid) for pid in tree):
        pass  # SIGKILL takes effect soon; a process that it does not reach runs into the test's timeout
