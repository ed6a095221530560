"""Enrichment of a table of short sequences, through one server and in process, from file to file."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.feather

from benchmarks.checkout import Checkout
from benchmarks.processes import now
from benchmarks.results import EnrichmentRates
from benchmarks.workload import NARROW, SHORT

ROWS, ROUNDS = 200_000, 5
COLUMN, OUTPUT = "embeddings", "enriched.arrow"


def measure(repository: Path, work: Path, report_progress: Callable[[str], None]) -> EnrichmentRates:
    """Enriches the same table in both ways, by turns.

    Args:
        repository: The models.
        work: Folder for the log and for temporary files.
        report_progress: Called with the name of each step before it starts.

    Raises:
        RuntimeError: A job failed; the message holds its output.
    """
    rates: dict[str, list[float]] = {"in process": [], "through one server": []}
    log = work / "enrichment.log"
    with TemporaryDirectory(dir=work) as folder, Checkout().serving(repository, log) as server:
        table = Path(folder) / "table.arrow"
        write_table(table, ROWS)
        options = {
            "in process": ("--model-repository", str(repository)),
            "through one server": ("--server", server.address),
        }
        for at in range(ROUNDS):
            for way in options if at % 2 == 0 else reversed(options):
                report_progress(f"enrichment {way}")
                rates[way].append(_rows_per_second(table, options[way]))
    own, served = (tuple(rates[way]) for way in options)
    return EnrichmentRates(now(), ROWS, own, served)


def write_table(path: Path, rows: int) -> None:
    """Writes a column of sequences of 6 vectors of 64."""
    shape = (SHORT.longest, NARROW.width)
    values = np.random.default_rng(0).standard_normal((rows, *shape), np.float32)
    column = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), shape),
        pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values[0].size),
    )
    pyarrow.feather.write_feather(pa.table({COLUMN: column}), path, compression="uncompressed")


def _rows_per_second(table: Path, options: tuple[str, ...]) -> float:
    output = table.with_name(OUTPUT)
    command = [sys.executable, "-m", "clients.enrich", str(table), str(output), "--model", NARROW.name]
    command += ["--column", COLUMN, "--overwrite", "--quiet", "--json", *options]
    checkout = Checkout()
    result = subprocess.run(  # noqa: S603 - a command of this repository
        command,
        cwd=checkout.root,
        env=checkout.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"enrichment failed:\n{result.stdout}{result.stderr}")
    summary = json.loads(result.stdout)
    return float(summary["rows"] / summary["seconds"])
