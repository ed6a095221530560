"""What is timed: copies over the bus, encoders and attention in process, and the server."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.artifact.tolerance import cosines
from attention_serving.export.precision import Precision
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.run.session import Session
from benchmarks.channel import EncodedRequest, UnaryCaller
from benchmarks.cuda.settings import BASE_ENCODER, NOT_HERE, SMALL_ENCODER, TINY_ENCODER, Row, Settings, word
from benchmarks.load import MeasurementWindow, measure
from benchmarks.run import echo
from benchmarks.wire import METHODS, Api, encode
from benchmarks.workload import Model
from scripts.local_server import ServerProcess, serving

MEGABYTE = 1_000_000
ROUNDS = 3
MOST_COSINE_DISTANCE = 0.01
MPS = "nvidia-cuda-mps-control"
SERVER_OPTIONS = (
    "--max-message-bytes=512MiB",
    "--max-memory=48GiB",
    "--max-in-flight-bytes=8GiB",
)
Call = Callable[[], Any]


def time_calls(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """The median seconds of each call, which run by turns for so long, after one of each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    until = time.perf_counter() + seconds
    while not times[next(iter(times))] or time.perf_counter() < until:
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in times.items()}


def describe_device(settings: Settings) -> Iterator[Row]:
    """The device, its driver and its bus, and GB/s of copies from 1 to 100 MB."""
    if settings.device is Provider.CPU:
        yield {"what": "device", "value": f"the CPU; a GPU is {NOT_HERE}"}
        return
    import torch  # noqa: PLC0415 - takes seconds

    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,compute_cap"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        values = subprocess.run(query, capture_output=True, text=True, check=True).stdout  # noqa: S603
        for name, value in zip(fields.split(","), values.splitlines()[0].split(","), strict=True):
            yield {"what": name, "value": value.strip()}
    except (OSError, subprocess.CalledProcessError) as error:
        yield {"what": "device", "value": f"{torch.cuda.get_device_name()}; nvidia-smi: {error}"}
    sizes, seconds = settings.pick((1, 4, 16, 64, 100), (1, 4)), settings.pick(0.1, 0.01)
    for size in sizes:
        there = torch.empty(size * MEGABYTE, dtype=torch.uint8, device="cuda")
        for memory in ("pageable", "pinned"):
            here = torch.ones(size * MEGABYTE, dtype=torch.uint8, pin_memory=memory == "pinned")
            calls = {
                "to the device": partial(_copy, there, here),
                "to the host": partial(_copy, here, there),
            }
            for direction, durations in time_calls(calls, seconds).items():
                yield {"what": f"copy of {size} MB, {memory}, {direction}", "GB/s": size / 1000 / durations}


def _copy(target: Any, source: Any) -> None:
    import torch  # noqa: PLC0415 - takes seconds

    target.copy_(source)
    torch.cuda.synchronize()


def texts_of(count: int, tokens: int, rng: np.random.Generator) -> list[str]:
    """Random texts of so many tokens."""
    words = rng.integers(1000, size=(count, tokens - 2))
    return [" ".join(map(word, row)) for row in words]


def encoder_of(settings: Settings, name: str) -> tuple[str, Precision]:
    """The encoder's name and precision; the tiny one in fp32 if the run is quick."""
    return settings.pick((name, Precision.FP16), (TINY_ENCODER, Precision.FP32))


def load_library(settings: Settings, name: str) -> Any:
    """The encoder in sentence-transformers, with SDPA: in fp16 on a GPU."""
    import torch  # noqa: PLC0415 - takes seconds
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    precision = torch.float16 if settings.device is Provider.CUDA else torch.float32
    options: Any = {"dtype": precision, "attn_implementation": "sdpa"}
    path = str(settings.cache / "encoders" / name)
    return SentenceTransformer(path, device=settings.device.value, model_kwargs=options)


def embed_by_library(library: Any, texts: Sequence[str]) -> Any:
    """Embeddings of one batch."""
    return library.encode(list(texts), batch_size=len(texts), show_progress_bar=False)


def time_encoder(settings: Settings, kind: str) -> Iterator[Row]:
    """Texts per second in process and of sentence-transformers, by turns, with the same texts."""
    name, precision = encoder_of(settings, kind)
    model = InProcessModel.load(settings.models, f"{name}-{precision}", provider=settings.device)
    library, rng = load_library(settings, name), np.random.default_rng(0)

    def embed(texts: Sequence[str]) -> Any:
        ids, _ = model.encode(texts)
        return np.stack(model.submit({model.inputs[0].name: ids}).result().outputs["embedding"])

    # The sizes of the goals come first: the step may be stopped at its limit.
    for tokens in settings.pick((128, 32, 512), (16,)):
        for size in settings.pick((32, 256, 1), (4, 1)):
            texts = texts_of(size, tokens, rng)
            pair = embed(texts), embed_by_library(library, texts)
            distance = 1 - float(cosines(*pair).min())
            calls = {"ours": partial(embed, texts), "library": partial(embed_by_library, library, texts)}
            durations = time_calls(calls, settings.pick(2.0, 0.1))
            yield {
                "encoder": f"{name}, {precision}",
                "texts": size,
                "tokens": tokens,
                "texts/s": size / durations["ours"],
                "sentence-transformers": size / durations["library"],
                "ratio": durations["library"] / durations["ours"],
                "tolerance": "holds"
                if distance < MOST_COSINE_DISTANCE
                else f"MISSED: cosine {1 - distance:.4f}",
            }


def time_compiled(settings: Settings) -> Iterator[Row]:
    """Texts per second of sentence-transformers after torch.compile, which takes most of the step."""
    import torch  # noqa: PLC0415 - takes seconds

    for kind in (SMALL_ENCODER, BASE_ENCODER) if not settings.quick else (SMALL_ENCODER,):
        name, _ = encoder_of(settings, kind)
        library, size, tokens = load_library(settings, name), *settings.pick((32, 128), (2, 16))
        if settings.device is Provider.CPU:
            yield {"encoder": kind, "torch.compile": NOT_HERE}
            continue
        library[0].auto_model = torch.compile(library[0].auto_model)
        texts, started = texts_of(size, tokens, np.random.default_rng(0)), time.perf_counter()
        embed_by_library(library, texts)
        seconds = time.perf_counter() - started
        durations = time_calls({"": partial(embed_by_library, library, texts)}, 1.0)[""]
        row = {"encoder": kind, "texts": size, "tokens": tokens}
        yield {**row, "torch.compile": size / durations, "seconds to compile": seconds}


def time_attention(settings: Settings) -> Iterator[Row]:
    """Sequences per second of attention: arrays of NumPy, as served, pinned and bound, and resident."""
    rows, width = settings.pick((128, 768), (16, 64))
    for precision in (Precision.FP16, Precision.FP32):
        folder = settings.folder(settings.wide, precision).resolve()
        file = folder / Manifest.load(folder).graphs[GraphKind.PLAIN].file
        unbound = Session(file, replace(settings.session_device, binds=False))
        session = Session(file, replace(settings.session_device, binds=True))
        for size in settings.pick((256, 32), (4,)):
            query = np.random.default_rng(0).standard_normal((size, rows, width), dtype=np.float32)
            served = session.empty(query.shape, query.dtype)
            served[...] = query
            calls: dict[str, Call] = {
                "NumPy": partial(unbound.run, {"query": query}),
                "as served": partial(session.run, {"query": served}),
            }
            for memory in ("pinned and bound", "resident"):
                calls[memory] = bind(session, query, settings.device, resident=memory == "resident")
            durations = time_calls(calls, settings.pick(2.0, 0.1))
            yield {
                "attention": f"{size} of {rows} x {width}, {precision}",
                **{name: size / value for name, value in durations.items()},
            }


def bind(session: Session, query: np.ndarray[Any, Any], device: Provider, *, resident: bool) -> Call:
    """A run whose input and output lie in memory that all calls use: pinned, or that of the device."""
    runtime: Any = session._session
    shape, name = query.shape, runtime.get_outputs()[0].name
    if resident:
        source = onnxruntime.OrtValue.ortvalue_from_numpy(query, device.value, 0)
        target = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, device.value, 0)
    else:
        arrays = [
            _pinned(shape) if device is Provider.CUDA else np.empty(shape, np.float32) for _ in range(2)
        ]
        arrays[0][...] = query
        source, target = map(onnxruntime.OrtValue.ortvalue_from_numpy, arrays)
    binding = runtime.io_binding()
    binding.bind_ortvalue_input("query", source)
    binding.bind_ortvalue_output(name, target)

    def call() -> Any:
        runtime.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return target

    return call


def _pinned(shape: Sequence[int]) -> Any:
    import torch  # noqa: PLC0415 - takes seconds

    return torch.empty(tuple(shape), pin_memory=True).numpy()


@contextmanager
def serve(
    settings: Settings, models: Sequence[tuple[str, Precision]], *options: str
) -> Iterator[ServerProcess]:
    """Runs the server of some artifacts until the block ends."""
    with TemporaryDirectory(dir=settings.cache) as name:
        repository, limits = Path(name) / "models", () if settings.quick else SERVER_OPTIONS
        for model, precision in models:
            folder = settings.folder(model, precision)
            copy = repository / folder.relative_to(settings.models)
            shutil.copytree(folder, copy, copy_function=os.link)
        log = settings.cache / "server.log"
        with serving(repository, log, f"--provider={settings.device}", *limits, *options) as server:
            yield server


@dataclass(frozen=True)
class Serving:
    """A set-up of the server, with the environment of its process."""

    workers: int = 1
    shares_device: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
SERVINGS = {
    "1 worker": Serving(),
    "1 worker, small workspace": Serving(environment=SMALL_WORKSPACE),
    "2 workers": Serving(workers=2),
    "2 workers, MPS": Serving(workers=2, shares_device=True),
}


def time_server(settings: Settings, name: str) -> Iterator[Row]:
    """Sequences per second over attention.v1, and of a bare echo of the same bytes."""
    encoder, setup = encoder_of(settings, SMALL_ENCODER), SERVINGS[name]
    wide = settings.wide, settings.pick(Precision.FP16, Precision.FP32)
    loads = dict(_loads(settings, encoder, wide))
    with ExitStack() as stack:
        if setup.shares_device and (reason := _start_mps(stack)):
            yield {"set-up": name, "request": reason}
            return
        server = stack.enter_context(serve(settings, [encoder, wide], f"--workers={setup.workers}"))
        address, _ = stack.enter_context(echo())
        pool = stack.enter_context(ProcessPoolExecutor(GENERATORS, get_context("spawn")))
        for request, load in loads.items():
            arguments = (*load, settings.pick(0.7, 0.1))
            served = _rate(pool, server.target, Api.ATTENTION, *arguments)
            bare = _rate(pool, address, Api.ECHO, *arguments)
            row = {"set-up": name, "request": request, "sequences/s": served, "bare echo": bare}
            yield {**row, "of echo": served / bare}


GENERATORS = 2
"""Processes that send requests, each over a connection of its own."""


def _loads(
    settings: Settings, encoder: tuple[str, Precision], wide: tuple[str, Precision]
) -> Iterator[tuple[str, tuple[EncodedRequest, int]]]:
    """By name, a request, and how many of it each generator has in flight."""
    rng, tokens = np.random.default_rng(0), settings.pick(128, 16)
    for size, in_flight in settings.pick(((32, 4), (256, 2), (1, 32)), ((4, 2), (1, 4))):
        texts = pb.TextSequences(texts=texts_of(size, tokens, rng))
        options: Any = {"model_name": "-".join(encoder), "embedding": pb.EmbeddingOptions()}
        data = pb.AttendRequest(text=texts, **options).SerializeToString()
        yield f"{size} texts", (EncodedRequest(data, size, size), in_flight)
    size, rows, width = settings.pick((256, 128, 768), (4, 16, 64))
    sequences = [rng.standard_normal((rows, width), dtype=np.float32) for _ in range(size)]
    model = Model(width, 12, wide[1], served_as="-".join(wide))
    data = encode(Api.ATTENTION, model, sequences)
    yield f"{size} x {rows} x {width}", (EncodedRequest(data, size, size), 1)


def _rate(pool: ProcessPoolExecutor, *arguments: Any) -> float:
    """Sequences per second of all generators; `arguments` are those of `_generate`."""
    jobs = [pool.submit(_generate, *arguments) for _ in range(GENERATORS)]
    return sum(job.result() for job in jobs)


def _generate(target: str, api: Api, request: EncodedRequest, in_flight: int, seconds: float) -> float:
    caller = UnaryCaller(target, METHODS[api], [request])
    result = measure(caller, 0, in_flight, MeasurementWindow(seconds, seconds / 4))
    if result.failures:
        raise RuntimeError(f"{result.failures} calls failed")
    return result.sequences / result.seconds


def _start_mps(stack: ExitStack) -> str:
    """Starts NVIDIA's multi-process service until the stack is left; returns why it cannot run."""
    if not (program := shutil.which(MPS)):
        return f"{MPS}: {NOT_HERE}"
    folder = stack.enter_context(TemporaryDirectory())
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    started = subprocess.run([program, "-d"], capture_output=True, text=True, check=False)  # noqa: S603
    stack.callback(subprocess.run, [program], input="quit\n", text=True, capture_output=True, check=False)
    return f"{MPS}: {started.stderr.strip()}" if started.returncode else ""
