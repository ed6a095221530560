"""What the server would calibrate on this device, and what it then expects of a batch."""

import numpy as np

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.cost import TIMED_SIZES, TIMED_SIZES_ON_DEVICE, time_runs
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.types import Ragged, Request
from benchmarks.cuda.models import Case
from benchmarks.cuda.plan import PRECISIONS, Run
from benchmarks.cuda.records import Records

NARROW = "multi-head-64x4"
TOGETHER = 32
LENGTHS = (6, 128)


def calibrate(run: Run, records: Records) -> None:
    """Calibrates the narrow and the wide module in every precision."""
    for name in dict.fromkeys((NARROW, run.extent.wide)):
        for precision in PRECISIONS:
            case = Case(name, precision)
            try:
                model = calibrated(
                    load_model(case.folder(run.models), Device(Provider(run.device), threads=1))
                )
            except (ArtifactError, ProviderError) as error:
                records.add(model=name, precision=precision, problem=str(error)[:300])
                continue
            _record(case, model, records)


def _record(case: Case, model: LoadedModel, records: Records) -> None:
    for kind, cost in model.costs.items():
        fields = {"model": case.module, "precision": case.precision, "graph": str(kind)}
        gains = {
            str(length): TOGETHER
            * model.seconds(kind, 1, length, length)
            / model.seconds(kind, TOGETHER, length, length)
            for length in LENGTHS
        }
        records.add(**fields, call=cost.call, row=cost.row, pair=cost.pair, gains=gains)
    timed = _timed(model)
    records.add(
        model=case.module,
        precision=case.precision,
        timed=[[count, length, seconds] for (count, length), seconds in timed.items()],
    )


def _timed(model: LoadedModel) -> dict[tuple[int, int], float]:
    """Durations of plain runs in seconds, by number and length of sequences, for tests of the cost model."""
    width = next(axis for axis in model.inputs[0].axes[2:] if isinstance(axis, int))
    limits = Limits(max_input_bytes=1 << 40, max_result_bytes=1 << 40, max_run_bytes=1 << 40)
    rng = np.random.default_rng(0)
    sizes = TIMED_SIZES if model.runs_on_host else TIMED_SIZES_ON_DEVICE
    rows = rng.standard_normal((max(count * length for count, length in sizes), width), dtype=np.float32)

    def run(count: int, length: int) -> None:
        request = Request(inputs={"query": Ragged(rows[: count * length], (length,) * count)})
        run_batch(model, GraphKind.PLAIN, validate(request, model, limits).sequences)

    return time_runs(sizes, run)
