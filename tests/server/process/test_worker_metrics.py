"""The metrics that several processes write, added up."""

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import values

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.events import CallEvent, EngineLoad
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import (
    FOLDER_VARIABLE,
    create_files,
    remove_gauges,
    worker_registry,
    write_metrics_to,
)
from tests.server.samples import ROOT
from tests.support.prometheus import shows


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what `write_metrics_to` changes in the process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def work(folder: Path, worker: int, *, calls: int, is_ready: bool) -> None:
    """Does what a process does that starts as this worker, counts calls, and publishes its load."""
    write_metrics_to(folder, worker)
    metrics = Metrics()
    for _ in range(calls):
        metrics.events.add(CallEvent("/a/B", "OK", 0.5))
    if not is_ready:
        metrics.loading([("m", "1")])
    load = EngineLoad(queue_depth=calls, queue_age_seconds=calls / 4)
    metrics.watch(lambda: load, lambda: CallLoad(open_calls=calls))
    metrics.refresh()


def test_counts_and_loads_add_up_and_other_gauges_show_the_worst_worker(tmp_path: Path) -> None:
    for worker in range(2):
        create_files(tmp_path, worker)
    work(tmp_path, 0, calls=2, is_ready=True)
    work(tmp_path, 1, calls=3, is_ready=False)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 5
        attention_request_seconds_count{method="/a/B"} 5
        attention_request_seconds_sum{method="/a/B"} 2.5
        attention_queue_depth 5
        attention_open_calls 5
        attention_queue_age_seconds 0.75
        attention_model_ready{model="m",version="1"} 0
        """,
    )
    remove_gauges(tmp_path, 1)
    assert shows(worker_registry(tmp_path), "attention_open_calls 2\nattention_queue_age_seconds 0.5")
    for _ in range(2):  # replacements of it, which go on with its counts and its files
        work(tmp_path, 1, calls=1, is_ready=True)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 7
        attention_request_seconds_sum{method="/a/B"} 3.5
        attention_open_calls 3
        """,
    )
    assert all(path.is_symlink() for path in tmp_path.iterdir())  # all of it is in memory


WITHOUT_SPACE = """
import os, sys
from contextlib import suppress
from pathlib import Path
from attention_serving.server.observe.prometheus import *
from tests.support.prometheus import published, value

folder = Path(sys.argv[1])
create_files(folder, 0)
write_metrics_to(folder, 0)
from attention_serving.server.engine.events import CallEvent
from attention_serving.server.observe.metrics import Metrics
metrics = Metrics()
with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
    while True:
        filler.write(bytes(4096))
assert os.statvfs(folder).f_bavail == 0
for number in range(2000):
    metrics.events.add(CallEvent(f"/a/{number}", "OK", 0.5))
metrics.refresh()
print(value(published(worker_registry(folder)), "attention_requests_total", method="/a/1999", code="OK"))
"""


def test_metrics_of_a_worker_grow_on_a_full_disk(tmp_path: Path) -> None:
    """In a real file system, which is mounted for one process."""
    mount = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, mount, tmp_path, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system allows this user no mounts")
    command += [mount, str(tmp_path), sys.executable, "-c", WITHOUT_SPACE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
