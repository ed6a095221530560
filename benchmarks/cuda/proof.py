"""The steps that need no clock: device, exports, parity, attention kernels and calibration.

Parity: golden vectors and the whole parity grid of every graph on the device, against eager PyTorch on the
CPU. The grid has masks, rows and sequences that may attend to nothing, positions, and queries and keys of
different lengths; see export/parity.py.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from attention_serving.artifact.manifest import BATCH_AXIS, MANIFEST_FILE, GraphKind, Manifest
from attention_serving.export.parity import BLOCK_GOLDEN_GRID, GOLDEN_GRID, PARITY_GRID, SEED, grid_cases
from attention_serving.export.signature import MASK_HEADS_AXIS, random_inputs, signatures
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from benchmarks.cuda.plan import PRECISIONS, Case, Record, Run, build

MOST_PROCESSES = 8
NARROW, TOGETHER, GAIN_LENGTHS = "multi-head-64x4", 32, (6, 128)
# The kernel for masks depends on whether 4 divides the length.
KERNEL_LENGTHS = {
    GraphKind.PLAIN: (128,),
    GraphKind.LENGTHS: (128,),
    GraphKind.MASK: (128, 129),
    GraphKind.WEIGHTS: (128,),
}
KERNEL_SECONDS = 60
CODE = """
import sys
import numpy as np, onnxruntime
from attention_serving.server.engine.run import cuda
path, inputs, name, options = sys.argv[1], sys.argv[2], sys.argv[3], dict(o.split("=") for o in sys.argv[4:])
if name == cuda.CUDA.name:
    cuda.preload()
onnxruntime.set_default_logger_severity(0)
session = onnxruntime.InferenceSession(path, providers=[(name, options)], enable_fallback=0)
session.run(None, dict(np.load(inputs)))
print("provider", session.get_providers()[0])
"""
# At level VERBOSE, and with ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1 in versions that print it.
CHOSEN = re.compile(
    r"ONNX Attention: using ([\w ]+?) \(|Attention: using (unified unfused) path|SdpaKernel=([A-Z_]+)"
)
KERNELS = {
    "flash": ("Flash Attention", "FLASH_ATTENTION"),
    "cuDNN": ("cuDNN SDPA", "cuDNN Flash Attention", "CUDNN_FLASH_ATTENTION"),
    "memory-efficient": ("Memory Efficient Attention", "EFFICIENT_ATTENTION"),
    "unfused": ("Unfused Attention", "unified unfused", "MATH"),
}


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


def kernels(run: Run) -> None:
    """Runs each graph once with ONNX Runtime's log on: a process for each graph and length."""
    jobs = [job for name in run.plan.kernel_models for job in _kernel_jobs(run, name)]
    with ThreadPoolExecutor(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        for found in pool.map(lambda job: _kernel(run, *job), jobs):
            run.add("kernels", **found)


def _kernel_jobs(run: Run, name: str) -> Iterator[tuple[Case, GraphKind, int, Path]]:
    by_kind = {signature.kind: signature for signature in signatures(build(name))}
    for kind, lengths in KERNEL_LENGTHS.items():
        for length in lengths:
            fixed = {BATCH_AXIS: 2, MASK_HEADS_AXIS: 1}
            sizes = {axis: fixed.get(axis, length) for axis in by_kind[kind].axes}
            inputs = run.work / f"{name}.{kind}.{length}.npz"
            arrays: dict[str, Any] = random_inputs(by_kind[kind], sizes, np.random.default_rng(SEED))
            np.savez(inputs, **arrays)
            for precision in PRECISIONS:
                yield Case(name, precision), kind, length, inputs


def _kernel(run: Run, case: Case, kind: GraphKind, length: int, inputs: Path) -> Record:
    found: Record = {**case._asdict(), "graph": str(kind), "length": length, "kernels": {}}
    folder, device = case.folder(run.models), Device(Provider(run.device))
    if not (folder / MANIFEST_FILE).exists():
        return {**found, "problem": "not exported"}
    path = folder / Manifest.load(folder).graphs[kind].file
    options = [f"{name}={value}" for name, value in device.options.items()]
    command = [sys.executable, "-c", CODE, str(path), str(inputs), device.provider.runtime.name, *options]
    environment = {**os.environ, "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
    try:
        ended = subprocess.run(  # noqa: S603 - this very interpreter
            command, env=environment, capture_output=True, timeout=KERNEL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {**found, "problem": f"not ended after {KERNEL_SECONDS} s"}
    log = (ended.stdout + ended.stderr).decode(errors="replace")
    (run.work / f"{case.name}.{kind}.{length}.log").write_text(log)
    problem = log.strip().splitlines()[-1][:300] if ended.returncode else ""
    return {**found, "kernels": dict(chosen_kernels(log)), "problem": problem}


def chosen_kernels(log: str) -> Counter[str]:
    """The kernels that the log names, and how often. A kernel that is not known here keeps its name there."""
    names = {name: kernel for kernel, own in KERNELS.items() for name in own}
    found = (next(filter(None, match.groups())) for match in CHOSEN.finditer(log))
    return Counter(names.get(name, name) for name in found)


def costs(run: Run) -> None:
    """What the server would calibrate on this device for the narrow and the wide module.

    Gain: what 32 runs of one sequence are expected to take, divided by one run of 32.
    """
    for name in dict.fromkeys((NARROW, run.plan.wide)):
        for precision in PRECISIONS:
            case = Case(name, precision)
            device = Device(Provider(run.device), threads=1)
            try:
                model = calibrated(load_model(case.folder(run.models), device))
            except Exception as error:  # as above
                run.add("costs", **case._asdict(), problem=str(error)[:300])
                continue
            for kind, cost in model.costs.items():
                gains = {
                    f"gain at length {length}": TOGETHER
                    * model.seconds(kind, 1, length, length)
                    / model.seconds(kind, TOGETHER, length, length)
                    for length in GAIN_LENGTHS
                }
                fixed = {"fixed µs of a run": 1e6 * cost.call, "row": cost.row, "pair": cost.pair}
                run.add("costs", **case._asdict(), graph=str(kind), **fixed, **gains)
