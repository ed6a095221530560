"""Embeddings of a table of short texts, from file to file: enrichment beside sentence-transformers.

Each is a process of its own: `python -m clients.enrich`, and this module with the paths of the table, the
result and the model's folder.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.encoders.folder import random_texts

SHORT_LENGTH, ROW_GROUP = 10, 20_000
POLL_SECONDS = 0.05


class Job(NamedTuple):
    """A job that has ended.

    Attributes:
        seconds: Duration of its process.
        peak_bytes: Largest memory of the process.
        embeddings: (rows, d), in the order of the table.
    """

    seconds: float
    peak_bytes: int
    embeddings: np.ndarray[tuple[int, int], np.dtype[np.float32]]


def write_table(path: Path, rows: int) -> None:
    """Writes a column of short texts."""
    pq.write_table(
        pa.table({"text": random_texts(rows, SHORT_LENGTH, seed=1)}), path, row_group_size=ROW_GROUP
    )


def enriched(table: Path, repository: Path, model: str) -> Job:
    """The job of this project, in process."""
    output = table.with_name(f"{model}.parquet")
    options = ["--model", model, "--text-column", "text", "--model-repository", str(repository), "--quiet"]
    return _run(["-m", "clients.enrich", str(table), str(output), *options], output)


def encoded(table: Path, folder: Path) -> Job:
    """The job of sentence-transformers."""
    output = table.with_name("reference.parquet")
    return _run(["-m", "benchmarks.encoders.table", str(table), str(output), str(folder)], output)


def _run(arguments: list[str], output: Path) -> Job:
    started, peak = time.perf_counter(), 0
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    while process.poll() is None:
        peak = max(peak, _peak_bytes(process.pid))
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} ended with status {process.returncode}")
    column = pq.read_table(output).column("embedding").combine_chunks()
    embeddings = column.flatten().to_numpy().reshape(len(column), -1)
    return Job(seconds, peak, embeddings)


def _peak_bytes(pid: int) -> int:
    """The largest memory of a process so far. That of wait4 includes the parent's before exec."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _main() -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - of the reference only

    source, output, folder = sys.argv[1:]
    table = pq.read_table(source)
    model = SentenceTransformer(folder, device="cpu")
    embeddings = model.encode(table.column("text").to_pylist(), show_progress_bar=False)
    values = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), embeddings.shape[1])
    pq.write_table(table.append_column("embedding", values), output)


if __name__ == "__main__":
    _main()
