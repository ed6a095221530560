"""Rates through a real server on the device, from a load generator on the same machine."""

import re
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.signature import call_eager, signatures
from benchmarks import load
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.cuda.models import Case, build
from benchmarks.cuda.plan import PRECISIONS, Run
from benchmarks.cuda.records import Records
from benchmarks.load import Endpoint, MeasurementWindow
from benchmarks.processes import ServerAddress
from benchmarks.wire import Api
from benchmarks.workload import AttentionKind, Lengths, Model, sequences

WARM_SECONDS = 0.5
# Batches as large as a device wants them; see docs/cuda.md.
LARGE = (
    "--max-message-bytes=512MiB",
    "--max-memory=48GiB",
    "--max-in-flight-bytes=8GiB",
    "--max-batch-bytes=8GiB",
    "--max-batch-sequences=256",
)
SECONDS = {"full": 2.0, "quick": 0.3}


@dataclass(frozen=True)
class ServedModel(Model):
    """A model of the benchmark by its name in the repository."""

    served_name: str = ""

    @property
    def name(self) -> str:
        """Its name in the repository."""
        return self.served_name


@dataclass(frozen=True)
class Pool(Lengths):
    """One length, and so many different sequences."""

    count: int = 1

    @property
    def pool(self) -> int:
        """Number of different sequences."""
        return self.count


def measure(run: Run, records: Records) -> None:
    """Serves the wide model in every precision that the device takes, and measures each load."""
    repository = _repository(run)
    log = run.work / "server.log"
    large = LARGE if run.plan == "full" else ()
    with Checkout().serving(repository, log, f"--provider={run.device}", *large) as server:
        for precision in PRECISIONS:
            case = Case(run.extent.wide, precision)
            if f"model={case.name} " not in _ready(log):
                records.add(precision=precision, problem="the server did not load the model; see server.log")
                continue
            for in_flight, per_request, length in run.extent.loads:
                fields = {
                    "precision": precision,
                    "in_flight": in_flight,
                    "per_request": per_request,
                    "length": length,
                }
                try:
                    found = _measure(run, case, server, log, in_flight, per_request, length)
                except (CallFailedError, ValueError) as error:
                    found = {"problem": str(error)[:300]}
                records.add(**fields, **found)


def _repository(run: Run) -> Path:
    """A model repository of the measured models only, so that the server starts soon."""
    folder = run.work / "served"
    folder.mkdir(exist_ok=True)
    for precision in PRECISIONS:
        name = Case(run.extent.wide, precision).name
        # Copies: the server refuses links that lead out of its repository.
        if not (folder / name).exists() and (run.models / name).exists():
            shutil.copytree(run.models / name, folder / name)
    return folder


def _ready(log: Path) -> str:
    return "\n".join(f"{line} " for line in log.read_text().splitlines() if " model ready " in line)


def _measure(
    run: Run, case: Case, server: ServerAddress, log: Path, in_flight: int, per_request: int, length: int
) -> dict[str, object]:
    config = build(case.module).config
    model = ServedModel(AttentionKind.SELF, config.d_query, config.num_heads, case.precision, case.name)
    lengths = Pool(length, count=max(4, per_request))
    endpoint = Endpoint(server.address, server.pid, Api.ATTENTION, model, lengths, per_request)
    holds = _holds(case, model, lengths, load.first_response(endpoint)[0])
    before = _batches(log)
    window = MeasurementWindow(SECONDS[run.plan], WARM_SECONDS)
    result = load.closed_loop(endpoint, in_flight, window)
    after = _batches(log)
    runs = after[1] - before[1]
    return {
        "rate": result.sequences / result.seconds,
        "p50": float(np.median(result.latencies)) / 1e9 if len(result.latencies) else None,
        "failures": result.failures,
        "batch": (after[0] - before[0]) / runs if runs else None,
        "holds": holds,
    }


def _holds(case: Case, model: Model, lengths: Lengths, served: np.ndarray) -> bool:
    """Whether an answer equals eager PyTorch in fp32 on the CPU, within the tolerance of the precision."""
    module = build(case.module)
    query = sequences(model, lengths)[0][0][np.newaxis]
    (expected,) = call_eager(module, signatures(module)[0], {"query": query})
    return TOLERANCES[Precision(case.precision)].holds(served, expected[0].numpy())


def _batches(log: Path) -> tuple[float, float]:
    """Sequences and runs of the server so far."""
    found = re.search(r"metrics_port=(\d+)", log.read_text())
    if found is None:
        raise ValueError("the server's log does not state the port of its metrics")
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums = [_total(text, f"attention_batch_sequences_{part}") for part in ("sum", "count")]
    return sums[0], sums[1]


def _total(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))
