"""One endpoint for what several processes write."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.workers.metrics import FleetMetrics
from tests.server.samples import ROOT
from tests.server.test_metrics import HOST, scrape, value

# A worker with so many calls, one model that is ready or not, and its measured error.
CODE = """
import sys
from pathlib import Path
from server.workers.metrics import write_to
write_to(Path(sys.argv[1]), int(sys.argv[2]))
from server.metrics import Metrics
metrics = Metrics()
for _ in range(int(sys.argv[3])):
    metrics.called("/a/B", "OK", 0.5)
metrics._ready.labels("m", "1").set(int(sys.argv[4]))
metrics._parity.labels("m", "1", "p").set(float(sys.argv[5]))
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetMetrics]:
    fleet = FleetMetrics(tmp_path, HOST, 0)
    yield fleet
    fleet.close()


def work(folder: Path, worker: int, *, calls: int, ready: int, error: float) -> None:
    """A worker's process, from start to end."""
    arguments = [str(folder), str(worker), str(calls), str(ready), str(error)]
    subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, check=True)


def test_counts_add_up_over_workers_and_their_replacements(fleet: FleetMetrics, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    work(tmp_path, 1, calls=3, ready=1, error=0.1)
    fleet.ended(1)
    files = len(list(tmp_path.iterdir()))
    for _ in range(2):
        work(tmp_path, 1, calls=1, ready=1, error=0.1)
    samples = scrape(fleet.port)
    assert value(samples, "attention_requests_total", method="/a/B", code="OK") == 7
    assert value(samples, "attention_request_seconds_count", method="/a/B") == 7
    assert value(samples, "attention_request_seconds_sum", method="/a/B") == pytest.approx(3.5)
    # Its two gauges again, and nothing more for each process that there was.
    assert len(list(tmp_path.iterdir())) == files + 2


def test_a_model_is_as_good_as_where_it_is_worst(fleet: FleetMetrics, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=0, ready=1, error=0.25)
    work(tmp_path, 1, calls=0, ready=0, error=0.5)
    samples = scrape(fleet.port)
    assert value(samples, "attention_model_ready", model="m", version="1") == 0
    assert value(samples, "attention_parity_max_abs_error", model="m", version="1", provider="p") == 0.5
    fleet.ended(1)
    samples = scrape(fleet.port)
    assert value(samples, "attention_model_ready", model="m", version="1") == 1
    assert value(samples, "attention_parity_max_abs_error", model="m", version="1", provider="p") == 0.25


def test_workers_are_counted_by_state(fleet: FleetMetrics) -> None:
    fleet.count(ready=3, starting=1)
    samples = scrape(fleet.port)
    assert value(samples, "attention_workers", state="ready") == 3
    assert value(samples, "attention_workers", state="starting") == 1


def test_a_file_that_is_being_made_is_passed_over(fleet: FleetMetrics, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    (tmp_path / "counter_1.db").touch()
    assert value(scrape(fleet.port), "attention_requests_total", method="/a/B", code="OK") == 2
