"""Which kernels compute the attention, by ONNX Runtime's own log. A process for each graph and length."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from attention_serving.artifact.manifest import BATCH_AXIS, MANIFEST_FILE, GraphKind, Manifest
from attention_serving.export.parity import SEED
from attention_serving.export.signature import MASK_HEADS_AXIS, random_inputs, signatures
from attention_serving.server.engine.run.provider import Device, Provider
from benchmarks.cuda.kernel_log import kernels
from benchmarks.cuda.models import Case, build
from benchmarks.cuda.plan import PRECISIONS, Run
from benchmarks.cuda.records import Records

# The kernel for masks depends on whether 4 divides the length.
LENGTHS = {
    GraphKind.PLAIN: (128,),
    GraphKind.LENGTHS: (128,),
    GraphKind.MASK: (128, 129),
    GraphKind.WEIGHTS: (128,),
}
BATCH = 2
SECONDS = 60
MOST_PROCESSES = 6
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


def look_up(run: Run, records: Records) -> None:
    """Runs each graph once with the log on."""
    jobs = [job for name in run.extent.kernel_models for job in _jobs(run, name)]
    with ThreadPoolExecutor(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        for found in pool.map(lambda job: _run(run, *job), jobs):
            records.add(**found)


def _jobs(run: Run, name: str) -> Iterator[tuple[Case, GraphKind, int, Path]]:
    by_kind = {signature.kind: signature for signature in signatures(build(name))}
    for kind, lengths in LENGTHS.items():
        for length in lengths:
            fixed = {BATCH_AXIS: BATCH, MASK_HEADS_AXIS: 1}
            sizes = {axis: fixed.get(axis, length) for axis in by_kind[kind].axes}
            inputs = run.work / f"{name}.{kind}.{length}.npz"
            arrays: dict[str, Any] = random_inputs(by_kind[kind], sizes, np.random.default_rng(SEED))
            np.savez(inputs, **arrays)
            for precision in PRECISIONS:
                yield Case(name, precision), kind, length, inputs


def _run(run: Run, case: Case, kind: GraphKind, length: int, inputs: Path) -> dict[str, object]:
    found = {"model": case.module, "precision": case.precision, "graph": str(kind), "length": length}
    folder, device = case.folder(run.models), Device(Provider(run.device))
    if not (folder / MANIFEST_FILE).exists():
        return {**found, "kernels": {}, "problem": "not exported"}
    path = folder / Manifest.load(folder).graphs[kind].file
    options = [f"{name}={value}" for name, value in device.options.items()]
    command = [sys.executable, "-c", CODE, str(path), str(inputs), device.provider.runtime.name, *options]
    environment = {**os.environ, "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
    try:
        ended = subprocess.run(  # noqa: S603 - this very interpreter
            command, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {**found, "kernels": {}, "problem": f"not ended after {SECONDS} s"}
    log = (ended.stdout + ended.stderr).decode(errors="replace")
    (run.work / f"{case.name}.{kind}.{length}.log").write_text(log)
    problem = log.strip().splitlines()[-1][:300] if ended.returncode else ""
    return {**found, "kernels": dict(kernels(log)), "problem": problem}
