"""The service on one NVIDIA GPU: proves every preset in each precision, and says what is measured.

Parity: golden vectors and the parity grid of every graph on the device, against eager PyTorch on the CPU. The
grid has masks, rows and sequences that may attend to nothing, positions, and queries and keys of different
lengths; see export/parity.py.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from attention_serving.artifact.manifest import is_whole
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import write_artifact
from attention_serving.export.parity import GOLDEN_GRID, PARITY_GRID, grid_cases
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.signature import AttentionModule, signatures
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device, Provider
from benchmarks.markdown import text
from benchmarks.processes import cores
from benchmarks.workload import LONG, MIDDLE, SHORT, Cell, Lengths, Model, Plan

# A causal module whose queries and keys differ in length. No preset has that.
CAUSAL_CROSS = "causal-cross-64x4"
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)
# Each has memory of the device.
MOST_PROCESSES = 4
WIDE = tuple(Model(768, 12, precision) for precision in PRECISIONS)
FULL = Plan(
    models=WIDE,
    lengths=(SHORT, MIDDLE, LONG, Lengths(2048)),
    in_flight=(1, 32),
    extra=tuple(Cell(model, MIDDLE, 2, 256) for model in WIDE),
    rounds=2,
    warm_seconds=0.2,
    device=Provider.CUDA,
    # Batches as large as a device wants them; see docs/cuda.md.
    server_options=(
        "--max-message-bytes=512MiB",
        "--max-memory=48GiB",
        "--max-in-flight-bytes=8GiB",
        "--max-batch-sequences=256",
    ),
)
NARROW = tuple(Model(64, 4, precision) for precision in PRECISIONS)
QUICK = Plan(
    models=NARROW,
    lengths=(SHORT,),
    in_flight=(1, 8),
    extra=(),
    open_cells=(Cell(NARROW[0], SHORT, 8),),
    shares=(0.5,),
    rounds=1,
    device=Provider.CUDA,
)


def prove_all(repository: Path, device: Provider, *, quick: bool) -> Iterator[tuple[str, ...]]:
    """Exports and proves all modules in every precision, several at once; yields rows of the report.

    A model that fails does not stop the others: its row says MISSED, and why.
    """
    names = ("multi-head-64x4", CAUSAL_CROSS) if quick else (*PRESETS, CAUSAL_CROSS)
    processes = max(1, min(MOST_PROCESSES, cores() // 2))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        cases = [(name, precision) for name in names for precision in PRECISIONS]
        jobs = [pool.submit(prove, *case, repository, device, quick=quick) for case in cases]
        for (name, precision), job in zip(cases, jobs, strict=True):
            try:
                verdict = job.result()
            except RuntimeError as error:  # also if the process has ended
                verdict = ("0", "-", f"MISSED: {error}", "")
            yield (name, precision, *verdict)


def prove(
    name: str, precision: Precision, repository: Path, device: Provider, *, quick: bool
) -> tuple[str, ...]:
    """Exports a module unless it is there, and compares its graphs on the device with eager PyTorch.

    Returns:
        The number of outputs that were compared, their largest error, whether the tolerance holds, and the
        operators that ran on the host.

    Raises:
        RuntimeError: The export failed, or the artifact is refused on the device.
    """
    torch.set_num_threads(1)
    module, model_id = _build(name), ModelId(f"{name}-{precision}")
    folder = model_id.folder(repository)
    try:
        if not is_whole(folder):
            tolerance = _tolerance(module, precision)
            write_artifact(
                module, model_id, repository, precision=precision, tolerance=tolerance, replace=True
            )
        model = load_model(folder, Device(device, threads=1))  # replays the golden vectors
        return _compare(module, model, GOLDEN_GRID if quick else PARITY_GRID)
    except Exception as error:  # of many types, some of which cannot be sent to another process
        raise RuntimeError(str(error)[:300]) from None


def _compare(
    module: AttentionModule, model: LoadedModel, grid: tuple[tuple[int, int, int], ...]
) -> tuple[str, ...]:
    tolerance, on_host = model.manifest.tolerance, Counter[str]()
    errors: list[float] = []
    missed: list[str] = []
    for signature in signatures(module):
        if (session := model.sessions.get(signature.kind)) is None:
            continue
        on_host.update(node.split()[0] for node in session.host_nodes)
        for _, golden in grid_cases(module, signature, grid):
            outputs = session.run(golden.inputs)
            for output, eager in golden.outputs.items():
                errors.append(tolerance.error(outputs[output], eager))
                if not tolerance.holds(outputs[output], eager):
                    missed.append(f"{signature.kind} {output}")
    verdict = f"MISSED: {', '.join(sorted(set(missed)))}" if missed else "holds"
    return str(len(errors)), f"{max(errors):.3g}", verdict, text(on_host)


def _tolerance(module: AttentionModule, precision: Precision) -> Tolerance:
    """That of the precision; twice as wide if the scores are not scaled, which amplifies their rounding."""
    factor = 2 if precision is not Precision.FP32 and module.config.scale == 1 else 1
    return Tolerance(rtol=factor * TOLERANCES[precision].rtol, atol=factor * TOLERANCES[precision].atol)


def _build(name: str) -> AttentionModule:
    """The module in eager PyTorch, in evaluation mode and fp32, always with the same weights."""
    if name != CAUSAL_CROSS:
        return build_preset(name)
    torch.manual_seed(0)
    return MultiHeadAttention(AttentionConfig(d_query=64, num_heads=4, cross=True, causal=True)).eval()
