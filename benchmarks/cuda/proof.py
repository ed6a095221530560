"""The steps that need no clock: device, exports and parity.

Parity: golden vectors and the whole parity grid of every graph on the device, against eager PyTorch on the
CPU. The grid has masks, rows and sequences that may attend to nothing, positions, and queries and keys of
different lengths; see export/parity.py.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from attention_serving.artifact.manifest import MANIFEST_FILE, GraphKind
from attention_serving.export.parity import BLOCK_GOLDEN_GRID, GOLDEN_GRID, PARITY_GRID, grid_cases
from attention_serving.export.signature import signatures
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from benchmarks.cuda.plan import Case, Record, Run, build

MOST_PROCESSES = 8


def check(run: Run) -> None:
    """Records the device. Ends the process with the reason if there is none."""
    if run.device == "cuda":
        try:
            run.add("check", **asdict(cuda.find_device()), cuda=cuda.cuda_version())
        except ProviderError as error:
            sys.exit(f"no GPU to measure: {error}")


def export(run: Run) -> None:
    """Exports every model that the repository lacks, several at once."""
    wanted = [case for case in run.cases() if not (case.folder(run.models) / MANIFEST_FILE).exists()]
    processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = {pool.submit(_export, case, run.models): case for case in wanted}
        for job in as_completed(jobs):
            error = job.exception()
            run.add("export", model=jobs[job].name, **({"problem": str(error)} if error else {}))


def _export(case: Case, repository: Path) -> None:
    import torch  # noqa: PLC0415

    from attention_serving.artifact.names import ModelId  # noqa: PLC0415
    from attention_serving.export.artifact import write_artifact  # noqa: PLC0415
    from attention_serving.export.precision import Precision  # noqa: PLC0415

    torch.set_num_threads(1)
    precision = Precision(case.precision)
    write_artifact(build(case.module), ModelId(case.name, 1), repository, precision=precision)


def proof(run: Run) -> None:
    """Proves each model in each precision; a model that fails does not stop the others."""
    for case in run.cases():
        try:
            model = load_model(case.folder(run.models), Device(Provider(run.device), threads=1))
            for measured in _grid(case, model, quick=run.quick):
                run.add("proof", **case._asdict(), golden_error=model.measured_error, **measured)
        except Exception as error:  # of the artifact, or of the runtime, which raises its own
            reason = (str(error).partition(": ")[2] or str(error))[:300]
            run.add("proof", **case._asdict(), graph="", holds=False, problem=reason)


def _grid(case: Case, model: LoadedModel, *, quick: bool) -> Iterator[Record]:
    module = build(case.module)
    tolerance = model.manifest.tolerance
    for signature in signatures(module):
        if signature.kind not in model.sessions:
            continue
        blocks = signature.kind in (GraphKind.BLOCKS, GraphKind.MASK_BLOCKS)
        points = (BLOCK_GOLDEN_GRID if blocks else GOLDEN_GRID) if quick else PARITY_GRID
        errors, holds = [0.0], True
        for _, golden in grid_cases(module, signature, points):
            outputs = model.sessions[signature.kind].run(golden.inputs)
            pairs = [(outputs[name], eager) for name, eager in golden.outputs.items()]
            errors += [tolerance.error(*pair) for pair in pairs]
            holds = holds and all(tolerance.holds(*pair) for pair in pairs)
        yield {
            "graph": str(signature.kind),
            "cases": len(errors) - 1,
            "error": max(errors),
            "holds": holds,
            "host": model.sessions[signature.kind].host_nodes,
        }
