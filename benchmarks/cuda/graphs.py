"""Captured CUDA graphs for fixed shapes, beside plain runs. Unless they pay here, the server needs none."""

from collections.abc import Iterable, Sequence

import numpy as np
import onnxruntime

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.run.session import left_on_host
from benchmarks.cuda.models import Case, build
from benchmarks.cuda.plan import Run
from benchmarks.cuda.rates import run_bound
from benchmarks.cuda.records import Records
from benchmarks.cuda.timing import time_call

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
SHAPES = ((1, 8), (1, 128), (32, 8), (32, 128))
PRECISIONS = ("fp32", "fp16")


def why_not_captured(
    operators: Iterable[str], host_operators: Sequence[str], shape: Sequence[int | str | None]
) -> str:
    """Why the runs of a graph cannot be captured and replayed; empty if they can.

    Args:
        operators: The kinds of all operators.
        host_operators: Operators that run on the host, where nothing is captured.
        shape: The sizes of the inputs. A replay repeats the sizes and the addresses of the first run.
    """
    if flow := sorted(set(operators) & CONTROL_FLOW):
        return f"control flow: {', '.join(flow)}"
    if host_operators:
        return f"operators on the host: {', '.join(host_operators)}"
    if unknown := [str(axis) for axis in shape if not isinstance(axis, int)]:
        return f"sizes that are not fixed: {', '.join(unknown)}"
    return ""


def measure(run: Run, records: Records) -> None:
    """Measures captured and plain runs with inputs and outputs on the device."""
    if run.device != "cuda":
        records.add(problem="captured graphs exist on CUDA only")
        return
    cuda.preload()
    for precision in PRECISIONS:
        for batch, length in SHAPES:
            cell = {"precision": precision, "batch": batch, "length": length}
            try:
                for captured in (False, True):
                    found = _measure(run, precision, (batch, length), captured=captured)
                    records.add(**cell, captured=captured, **found)
            except Exception as error:  # the runtime raises many types
                records.add(**cell, problem=str(error)[:300])


def _measure(run: Run, precision: str, size: tuple[int, int], *, captured: bool) -> dict[str, object]:
    folder, device = Case(run.extent.wide, precision).folder(run.models), Device(Provider.CUDA)
    path = folder / Manifest.load(folder).graphs[GraphKind.PLAIN].file
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    chosen = device.options | {"enable_cuda_graph": str(int(captured))}
    session = onnxruntime.InferenceSession(
        path, options, providers=[(device.provider.runtime.name, chosen)], enable_fallback=0
    )
    shape = (*size, int(build(run.extent.wide).config.d_query))
    assigned = session.get_provider_graph_assignment_info()
    operators = [node.op_type for part in assigned for node in part.get_nodes()]
    host = left_on_host(assigned, device.provider.runtime.name).tensors
    if captured and (reason := why_not_captured(operators, host, shape)):
        return {"problem": reason}
    query = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(query, "cuda", 0)
    result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(query), "cuda", 0)
    binding.bind_ortvalue_input("query", value)
    binding.bind_ortvalue_output("context_vectors", result)
    return time_call(lambda: run_bound(session, binding), run.extent.seconds)._asdict()
