"""The steps that measure: ONNX Runtime and eager PyTorch in process, and the server.

In process both take fp32 from the host and return fp32 to it; in a half precision, both convert on the
device. Each library has a process of its own. Shapes: B batch, T rows, d width.
"""

import shutil
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.types import Array
from benchmarks.cuda.plan import PRECISIONS, Case, Record, Run, build
from benchmarks.cuda.report import ONNX, TORCH
from benchmarks.workload import AttentionKind, Lengths, Model

WARM_CALLS, LEAST_CALLS, WARM_SECONDS = 3, 3, 0.5
# Makes the call of a cell for inputs (B, T, d).
Prepare = Callable[[Array], Callable[[], object]]


def onnx(run: Run) -> None:
    """Measures ONNX Runtime in every precision."""
    _measure(run, "onnx", ONNX, _onnx)


def torch(run: Run) -> None:
    """Measures eager PyTorch with its scaled dot-product attention in every precision."""
    _measure(run, "torch", TORCH, _torch)


def _measure(run: Run, step: str, system: str, load: Callable[[Run, str], Prepare]) -> None:
    rng = np.random.default_rng(0)
    for precision in PRECISIONS:
        try:
            prepare = load(run, precision)
        except Exception as error:  # each library raises its own
            run.add(step, precision=precision, problem=f"does not load: {error}")
            continue
        for batch, length in run.plan.cells():
            query = rng.standard_normal((batch, length, run.plan.width), dtype=np.float32)
            cell = {"precision": precision, "batch": batch, "length": length}
            try:
                run.add(step, **cell, system=system, median=_time(prepare(query), run.plan.seconds))
            except Exception as error:  # such as too little memory on the device
                run.add(step, **cell, problem=str(error)[:300])


def _time(call: Callable[[], object], seconds: float) -> float:
    """Repeats a call, which returns when its result is there; returns the median duration in seconds."""
    for _ in range(WARM_CALLS):
        call()
    durations: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(durations) < LEAST_CALLS:
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return median(durations)


def _onnx(run: Run, precision: str) -> Prepare:
    from attention_serving.server.engine.run.session import Session  # noqa: PLC0415 - loads ONNX Runtime

    folder = Case(run.plan.wide, precision).folder(run.models)
    path = folder / Manifest.load(folder).graphs[GraphKind.PLAIN].file
    session = Session(path.resolve(), Device(Provider(run.device)))

    def prepare(query: Array) -> Callable[[], object]:
        return lambda: session.run({"query": query})

    return prepare


def _torch(run: Run, precision: str) -> Prepare:
    import torch  # noqa: PLC0415 - ONNX Runtime is measured without it

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    module = build(run.plan.wide).to(run.device, dtype)
    on_gpu = run.device == "cuda"

    def prepare(query: Array) -> Callable[[], object]:
        host = torch.from_numpy(query)
        host = host.pin_memory() if on_gpu else host
        result = torch.empty_like(host, pin_memory=on_gpu)

        @torch.inference_mode()
        def compute() -> None:
            there = host.to(run.device, non_blocking=True)
            result.copy_(module(there.to(dtype))[0].float(), non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()

        return compute

    return prepare


def service(run: Run) -> None:
    """Serves the wide model in every precision that the device takes, and measures each load."""
    from benchmarks.checkout import Checkout  # noqa: PLC0415 - the other steps need no gRPC

    # A repository of these models only, so that the server starts soon; it refuses links that lead elsewhere.
    repository = run.work / "served"
    cases = [Case(run.plan.wide, precision) for precision in PRECISIONS]
    for case in cases:
        if case.folder(run.models).exists():
            shutil.copytree(run.models / case.name, repository / case.name, dirs_exist_ok=True)
    log = run.work / "server.log"
    options = (f"--provider={run.device}", *run.plan.server_options)
    with Checkout().serving(repository, log, *options) as server:
        ready = [f"{line} " for line in log.read_text().splitlines() if " model ready " in line]
        for case in cases:
            if not any(f"model={case.name} " in line for line in ready):
                run.add(
                    "service", precision=case.precision, problem="not loaded by the server; see server.log"
                )
                continue
            for load in run.plan.loads:
                fields = dict(zip(("in_flight", "per_request", "length"), load, strict=True))
                run.add("service", precision=case.precision, **fields, **_served(run, case, server, *load))


def _served(run: Run, case: Case, server: Any, in_flight: int, per_request: int, length: int) -> Record:
    """Measures one load, and whether its first answer equals eager PyTorch in fp32 on the CPU."""
    from attention_serving.export.precision import TOLERANCES, Precision  # noqa: PLC0415
    from attention_serving.export.signature import call_eager, signatures  # noqa: PLC0415
    from benchmarks import load  # noqa: PLC0415
    from benchmarks.channel import CallFailedError  # noqa: PLC0415
    from benchmarks.wire import Api  # noqa: PLC0415
    from benchmarks.workload import sequences  # noqa: PLC0415

    module = build(case.module)
    config = module.config
    model = Model(AttentionKind.SELF, config.d_query, config.num_heads, served_as=case.name)
    endpoint = load.Endpoint(server.address, server.pid, Api.ATTENTION, model, Lengths(length), per_request)
    window = load.MeasurementWindow(run.plan.served_seconds, WARM_SECONDS)
    try:
        first = load.first_response(endpoint)[0]
        result = load.closed_loop(endpoint, in_flight, window)
    except (CallFailedError, ValueError) as error:
        return {"problem": str(error)[:300]}
    query = sequences(model, Lengths(length))[0][0][np.newaxis]
    (expected,) = call_eager(module, signatures(module)[0], {"query": query})
    return {
        "rate": result.sequences / result.seconds,
        "p50 µs": float(np.median(result.latencies)) / 1e3 if len(result.latencies) else None,
        "failures": result.failures,
        "holds": TOLERANCES[Precision(case.precision)].holds(first, expected[0].numpy()),
    }
