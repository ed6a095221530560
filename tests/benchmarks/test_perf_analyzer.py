"""How perf_analyzer is called, and what is read of its report; a script stands in for the program."""

from pathlib import Path

import pytest

from benchmarks import peers, perf_analyzer
from benchmarks.processes import ServerAddress
from benchmarks.results import SERVICE
from benchmarks.systems import MeasurementError
from benchmarks.workload import SHORT, AttentionKind, Cell, Model

CELL = Cell(Model(AttentionKind.CROSS, 64, 4), SHORT, 8)
SERVER = ServerAddress("127.0.0.1:8001", 1)
REPORT = """\
#!/bin/sh
echo "$@" > "$0.arguments"
for last; do :; done
printf 'Concurrency,Inferences/Second,p50 latency,p90 latency\\n8,1500.5,5300,6000\\n' > "$last"
"""
FAILURE = """\
#!/bin/sh
echo 'error: failed to get model metadata'
exit 99
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path))
    assert not perf_analyzer.is_installed()
    path = tmp_path / perf_analyzer.PROGRAM
    path.parent.mkdir(parents=True)
    path.write_text(REPORT)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("batch_axis", "shape"), [(False, "6,64"), (True, "1,6,64")])
def test_a_measurement(program: Path, batch_axis: bool, shape: str) -> None:
    assert perf_analyzer.is_installed()
    found = perf_analyzer.measure(CELL, SERVICE, SERVER, 2, seconds=0.9, batch_axis=batch_axis)

    assert (found.cell, found.system, found.round) == (CELL, SERVICE, 2)
    assert (found.sequences_per_second, found.tokens_per_second) == (1500.5, 9003.0)
    assert found.latency.p50 == 5300
    arguments = program.with_suffix(".arguments").read_text()
    assert arguments.startswith(f"-m {CELL.model.name} -u 127.0.0.1:8001 -i grpc ")
    assert f"--shape query:{shape} --shape key:{shape} --concurrency-range=8 " in arguments
    assert " --measurement-interval=300 " in arguments


def test_a_failure_is_reported_with_its_output(program: Path) -> None:
    program.write_text(FAILURE)
    with pytest.raises(MeasurementError, match="failed to get model metadata"):
        perf_analyzer.measure(CELL, SERVICE, SERVER, 0, seconds=0.9, batch_axis=False)
