"""Which kernels compute the graphs, and whether every graph keeps its tolerance on the device."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from tempfile import TemporaryFile

import onnxruntime
import torch

from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.kernels import Kernel
from attention_serving.artifact.manifest import Graph
from attention_serving.export.parity import GOLDEN_GRID, PARITY_GRID, grid_cases
from attention_serving.export.precision import Precision
from attention_serving.export.signature import signatures, sizes_of
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.run.session import FATAL, Session
from benchmarks.cuda.artifacts import SIZES, build
from benchmarks.cuda.settings import NOT_HERE, Row, Settings
from benchmarks.markdown import text
from benchmarks.processes import cores

# Each has memory of the device.
MOST_PROCESSES = 8
VERBOSE, STANDARD_ERROR = 0, 2
# What ONNX Runtime's log says of kernels, and of copies between the devices. Sources: cuda/llm/attention.cc
# and optimizer/transformer_memcpy.cc of ONNX Runtime 1.31.
KERNEL_LINES = {
    "Attention: using Flash Attention": Kernel.FLASH,
    "Attention: using Memory Efficient Attention": Kernel.MEMORY_EFFICIENT,
    "Attention: using unified unfused path": Kernel.UNFUSED,
}
MEMCPY = re.compile(r"(\d+) Memcpy nodes are added")


def compare_kernels(settings: Settings) -> Iterator[Row]:
    """For each graph, the kernels of all fixed cases that the log names, beside those of the predictor."""
    wide = [(settings.wide, Precision.FP16), (settings.wide, Precision.FP32)]
    for name, precision in dict.fromkeys([*settings.encoders, *wide, *settings.tiny]):
        if precision is Precision.BF16 and settings.device is Provider.CPU:
            continue
        fixed = list(settings.fixed_cases(name, precision))
        for kind, graph in fixed[0][0].graphs.items():
            cases = [case for *_, case in fixed if case.graph is kind]
            file = settings.folder(name, precision).resolve() / graph.file
            with captured_log() as lines:
                session = Session(file, settings.session_device)
                for case in cases:
                    session.run(case.inputs)
            log, on_cpu = count_kernels(lines), settings.device is Provider.CPU
            predicted = sum((predict_kernels(graph, case) for case in cases), Counter[str]())
            yield {
                "graph": f"{name}-{precision} {kind}",
                "kernels by the log": NOT_HERE if on_cpu else text(log),
                "predicted": text(predicted),
                "agree": "-" if on_cpu else "yes" if log == predicted else "NO",
                "Memcpy nodes": sum(int(n) for line in lines for n in MEMCPY.findall(line)),
                "operators on the host": text(Counter(node.split()[0] for node in session.host_nodes)),
                "lines of the log": len(lines),
            }


def count_kernels(lines: Sequence[str]) -> Counter[str]:
    """How often the log names each kernel."""
    return Counter(kernel.name for line in lines for key, kernel in KERNEL_LINES.items() if key in line)


def predict_kernels(graph: Graph, case: GoldenCase) -> Counter[str]:
    """How often the predictor names each kernel for one run."""
    sizes, kernels = sizes_of(graph.inputs, case.inputs), Counter[str]()
    for operator in graph.attention:
        kernels[operator.kernel(sizes).name] += operator.count
    return kernels


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects the verbose log of ONNX Runtime, which writes it to the process's standard error."""
    lines: list[str] = []
    saved = os.dup(STANDARD_ERROR)
    with TemporaryFile() as file:
        os.dup2(file.fileno(), STANDARD_ERROR)
        onnxruntime.set_default_logger_severity(VERBOSE)
        try:
            yield lines
        finally:
            onnxruntime.set_default_logger_severity(FATAL)
            os.dup2(saved, STANDARD_ERROR)
            os.close(saved)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def prove_all(settings: Settings) -> Iterator[Row]:
    """Proves all artifacts, several at once, in the order in which they are ready.

    A model that fails does not stop the others: its row says MISSED, and why.
    """
    names = dict.fromkeys([*settings.encoders, *settings.presets, *settings.tiny])
    with ProcessPoolExecutor(max(1, min(MOST_PROCESSES, cores())), get_context("spawn")) as pool:
        jobs = {pool.submit(prove, settings, *case): case for case in names}
        for job in as_completed(jobs):
            name, precision = jobs[job]
            yield {"model": name, "precision": precision.value, **job.result()}


def prove(settings: Settings, name: str, precision: Precision) -> Row:
    """Compares the graphs of an artifact on the device with eager PyTorch.

    Golden vectors and fixed cases were computed beforehand; those of the parity grid are computed here, for
    attention modules.
    """
    torch.set_num_threads(1)
    if precision is Precision.BF16 and settings.device is Provider.CPU:
        return {"tolerance": NOT_HERE}
    try:
        model = load_model(
            settings.folder(name, precision), settings.session_device
        )  # replays golden vectors
        cases = list[GoldenCase]()
        if settings.fixed_file(name, precision).exists():
            cases += [case for *_, case in settings.fixed_cases(name, precision)]
        if name not in SIZES:
            module = build(name)
            grid = settings.pick(PARITY_GRID, GOLDEN_GRID)
            cases += [
                case
                for signature in signatures(module)
                if signature.kind in model.sessions
                for _, case in grid_cases(module, signature, grid)
            ]
        errors, missed, tolerance = [model.measured_error], set[str](), model.manifest.tolerance
        for case in cases:
            outputs = model.sessions[case.graph].run(case.inputs)
            for output, eager in case.outputs.items():
                errors.append(tolerance.error(outputs[output], eager))
                if not tolerance.holds(outputs[output], eager):
                    missed.add(f"{case.graph} {output}")
        on_host = Counter(
            node.split()[0] for session in model.sessions.values() for node in session.host_nodes
        )
    except Exception as error:  # of many types, some of which cannot be sent to another process
        return {"tolerance": f"MISSED: {str(error)[:300]}"}
    return {
        "outputs compared": len(errors),
        "largest error": max(errors),
        "tolerance": f"MISSED: {', '.join(sorted(missed))}" if missed else "holds",
        "operators on the host": text(on_host),
    }
