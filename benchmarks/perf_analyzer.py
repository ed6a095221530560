"""Triton's load generator, perf_analyzer: a second opinion on the rates, by another client library."""

import csv
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import peers
from benchmarks.processes import ServerAddress
from benchmarks.results import Measurement, Percentiles
from benchmarks.systems import MeasurementError
from benchmarks.workload import Cell

NAME = "perf_analyzer"
PROGRAM = "perf/bin/perf_analyzer"
LIBRARIES = "perf/lib/python3*/site-packages/nvidia/cuda_runtime/lib"
"""The program is linked with the CUDA runtime, which it needs for CUDA shared memory only."""
WINDOWS = 3
"""It reports the mean of three windows."""
LONGEST_SECONDS = 60


def is_installed() -> bool:
    """Returns whether `install.sh perf` has been run."""
    return (peers.home() / PROGRAM).exists()


def measure(
    cell: Cell, system: str, server: ServerAddress, at_round: int, *, seconds: float, batch_axis: bool
) -> Measurement:
    """Measures one server of the Open Inference Protocol with sequences of one length.

    Args:
        cell: A cell with one length and one sequence in a request.
        system: The server's name in reports.
        server: Where it listens.
        at_round: Number of the round.
        seconds: Duration of the measurement.
        batch_axis: Whether the model's configuration lists the batch axis (`max_batch_size: 0`).

    Raises:
        MeasurementError: perf_analyzer failed; the message holds its output.
    """
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        options = _arguments(cell, server, seconds, batch_axis=batch_axis)
        result = subprocess.run(  # noqa: S603 - a peer's program
            [peers.home() / PROGRAM, *options, "-f", report],
            env={**os.environ, "LD_LIBRARY_PATH": _library_path()},
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_SECONDS,
        )
        if result.returncode or not report.exists():
            raise MeasurementError(f"{NAME}: {result.stdout[-500:]}{result.stderr[-500:]}")
        (row,) = csv.DictReader(report.read_text().splitlines())
    rate = float(row["Inferences/Second"])
    return Measurement(
        cell=cell,
        system=system,
        round=at_round,
        sequences_per_second=rate,
        tokens_per_second=rate * cell.lengths.longest,
        seconds=seconds,
        latency=Percentiles(int(rate * seconds), float(row["p50 latency"])),
    )


def _arguments(cell: Cell, server: ServerAddress, seconds: float, *, batch_axis: bool) -> list[str]:
    rows = f"{cell.lengths.longest},{cell.model.width}"
    shape = f"1,{rows}" if batch_axis else rows
    return [
        *("-m", cell.model.name, "-u", server.address, "-i", "grpc"),
        *(part for name in cell.model.inputs for part in ("--shape", f"{name}:{shape}")),
        f"--concurrency-range={cell.in_flight}",
        f"--measurement-interval={1000 * seconds / WINDOWS:.0f}",
        "--stability-percentage=999",  # the rounds show how stable the rates are
    ]


def _library_path() -> str:
    found = [str(path) for path in peers.home().glob(LIBRARIES)]
    return os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
