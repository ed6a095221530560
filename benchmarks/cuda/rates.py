"""Rates in process: ONNX Runtime and eager PyTorch, with inputs on the host and with inputs on the device.

Both take fp32 and return fp32; in a half precision, both convert on the device. Each library has a process
of its own. Shapes: B batch, T rows, d width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.types import Array
from benchmarks.cuda.models import Case, build
from benchmarks.cuda.plan import PRECISIONS, Run
from benchmarks.cuda.records import Records
from benchmarks.cuda.systems import ONNX_DEVICE, ONNX_HOST, TORCH_DEVICE, TORCH_HOST
from benchmarks.cuda.timing import time_call

# Makes the calls of a cell by system, for inputs (B, T, d).
Prepare = Callable[[Array], Iterator[tuple[str, Callable[[], object]]]]


def measure_onnx(run: Run, records: Records) -> None:
    """Measures ONNX Runtime in every precision."""
    for precision in PRECISIONS:
        _measure(run, records, precision, _onnx)


def measure_torch(run: Run, records: Records) -> None:
    """Measures eager PyTorch with its scaled dot-product attention in every precision."""
    for precision in PRECISIONS:
        _measure(run, records, precision, _torch)


def _measure(run: Run, records: Records, precision: str, load: Callable[[Run, str], Prepare]) -> None:
    try:
        prepare = load(run, precision)
    except Exception as error:  # each library raises its own
        records.add(precision=precision, problem=f"does not load: {error}")
        return
    width = int(build(run.extent.wide).config.d_query)
    rng = np.random.default_rng(0)
    for batch, length in run.extent.cells():
        query = rng.standard_normal((batch, length, width), dtype=np.float32)
        cell = {"precision": precision, "batch": batch, "length": length}
        try:
            for system, call in prepare(query):
                records.add(**cell, system=system, **time_call(call, run.extent.seconds)._asdict())
        except Exception as error:  # such as too little memory on the device
            records.add(**cell, problem=str(error)[:300])


def _onnx(run: Run, precision: str) -> Prepare:
    import onnxruntime  # noqa: PLC0415 - PyTorch is measured without it

    from attention_serving.server.engine.run.session import Session  # noqa: PLC0415

    folder = Case(run.extent.wide, precision).folder(run.models)
    path = folder / Manifest.load(folder).graphs[GraphKind.PLAIN].file
    device = Device(Provider(run.device))
    session = Session(path.resolve(), device)
    providers = [(device.provider.runtime.name, device.options)]
    bare = onnxruntime.InferenceSession(path.resolve(), providers=providers, enable_fallback=0)

    def prepare(query: Array) -> Iterator[tuple[str, Callable[[], object]]]:
        host = session.empty(query.shape, query.dtype)
        host[...] = query
        yield ONNX_HOST, lambda: session.run({"query": host})
        binding = bare.io_binding()
        value = onnxruntime.OrtValue.ortvalue_from_numpy(query, run.device, 0)
        binding.bind_ortvalue_input("query", value)
        binding.bind_output("context_vectors", run.device, 0)
        yield ONNX_DEVICE, partial(run_bound, bare, binding)

    return prepare


def run_bound(session: Any, binding: Any) -> None:
    """Runs a session with an IO binding, and waits for the result."""
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def _torch(run: Run, precision: str) -> Prepare:
    import torch  # noqa: PLC0415 - ONNX Runtime is measured without it

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    module = build(run.extent.wide).to(run.device, dtype)
    on_gpu = run.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None

    @torch.inference_mode()
    def compute(query: torch.Tensor) -> torch.Tensor:
        context, _ = module(query.to(dtype))
        return torch.as_tensor(context).float()

    def prepare(query: Array) -> Iterator[tuple[str, Callable[[], object]]]:
        host = torch.from_numpy(query)
        host = host.pin_memory() if on_gpu else host
        result = torch.empty_like(host, pin_memory=on_gpu)

        def from_host() -> None:
            result.copy_(compute(host.to(run.device, non_blocking=True)), non_blocking=True)
            wait()

        there = host.to(run.device)

        def on_device() -> None:
            compute(there)
            wait()

        yield TORCH_HOST, from_host
        yield TORCH_DEVICE, on_device

    return prepare
