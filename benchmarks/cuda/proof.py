"""Proof: golden vectors and the whole parity grid of every graph on the device, against eager PyTorch on CPU.

The grid has masks, rows and sequences that may attend to nothing, positions, and queries and keys of
different lengths; see export/parity.py.
"""

from collections.abc import Iterator

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.parity import BLOCK_GOLDEN_GRID, GOLDEN_GRID, PARITY_GRID, grid_cases
from attention_serving.export.signature import signatures
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from benchmarks.cuda.models import Case, build, cases
from benchmarks.cuda.plan import Run
from benchmarks.cuda.records import Record, Records


def prove(run: Run, records: Records) -> None:
    """Proves each model in each precision; a model that fails does not stop the others."""
    for case in cases(run):
        found = {"model": case.module, "precision": case.precision}
        try:
            model = load_model(case.folder(run.models), Device(Provider(run.device), threads=1))
        except (ArtifactError, ProviderError) as error:
            records.add(**found, graph="", holds=False, problem=str(error).partition(": ")[2] or str(error))
            continue
        for measured in _grid(case, model, quick=run.plan == "quick"):
            records.add(**found, golden_error=model.measured_error, provider=model.provider, **measured)


def _grid(case: Case, model: LoadedModel, *, quick: bool) -> Iterator[Record]:
    module = build(case.module)
    tolerance = model.manifest.tolerance
    for signature in signatures(module):
        if signature.kind not in model.sessions:
            continue
        errors, holds = [0.0], True
        for _, golden in grid_cases(module, signature, _points(signature.kind, quick=quick)):
            outputs = model.sessions[signature.kind].run(golden.inputs)
            pairs = [(outputs[name], eager) for name, eager in golden.outputs.items()]
            errors += [tolerance.error(*pair) for pair in pairs]
            holds = holds and all(tolerance.holds(*pair) for pair in pairs)
        yield {
            "graph": str(signature.kind),
            "cases": len(errors) - 1,
            "error": max(errors),
            "holds": holds,
            "host": model.sessions[signature.kind].host_nodes._asdict(),
        }


def _points(kind: GraphKind, *, quick: bool) -> tuple[tuple[int, int, int], ...]:
    if not quick:
        return PARITY_GRID
    return BLOCK_GOLDEN_GRID if kind in (GraphKind.BLOCKS, GraphKind.MASK_BLOCKS) else GOLDEN_GRID
