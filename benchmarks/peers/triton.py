"""Starts NVIDIA Triton for one ONNX graph, with its Python backend or its own C++ ONNX Runtime backend."""

import ctypes
import os
import shutil
import sysconfig
from pathlib import Path

from benchmarks.peers.launch import Command, Launch
from benchmarks.processes import cores

BACKENDS_VARIABLE = "TRITON_BACKENDS"
"""Names the folder of Triton's own backends, of which that for ONNX Runtime is measured; see install.sh."""
PYTHON_MODEL = Path(__file__).with_name("triton_model.py")
MAX_BATCH = 32
PYTHON_DELAY_MICROSECONDS = 500

CONFIG = """\
name: "{name}"
backend: "{backend}"
max_batch_size: {max_batch}
{inputs}output [ {{ name: "context_vectors" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
"""
INPUT = 'input [ {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]\n'
BATCHING = "dynamic_batching {{ max_queue_delay_microseconds: {delay} }}\n"
GRAPH = 'default_model_filename: "{graph}"\n'
THREADS = 'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{threads}" }} }}\n'


def backends() -> Path | None:
    """The folder of Triton's own backends; None if the user names none with the one for ONNX Runtime."""
    named = os.environ.get(BACKENDS_VARIABLE)
    if not named or not Path(named, "onnxruntime/libtriton_onnxruntime.so").exists():
        return None
    return Path(named).resolve()


def runtime_version(folder: Path) -> str:
    """The version that the ONNX Runtime of Triton's own backend states."""
    libraries = sorted((folder / "onnxruntime").glob("libonnxruntime.so*"))
    try:
        base = ctypes.CDLL(str(libraries[0])).OrtGetApiBase
    except (IndexError, OSError):  # there is none, or it needs libraries that are not here
        return "unknown"
    base.restype = ctypes.POINTER(ctypes.c_void_p)  # GetApi, GetVersionString
    version: bytes = ctypes.CFUNCTYPE(ctypes.c_char_p)(base()[1])()
    return version.decode()


def python_backend(launch: Launch) -> Command:
    """One instance that runs ONNX Runtime on all cores; requests of equal shape are batched."""
    batching = BATCHING.format(delay=PYTHON_DELAY_MICROSECONDS)
    version = _repository(launch, "python", batching, instances=1, max_batch=MAX_BATCH)
    shutil.copy(PYTHON_MODEL, version / "model.py")
    site = _site_packages(launch.home)
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": os.pathsep.join([str(launch.home / "triton/bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(site),
    }
    return Command(_arguments(launch, site / "pytriton/tritonserver/backends"), environment)


def onnxruntime_backend(launch: Launch) -> Command:
    """One instance of one thread for each core, batches without delay: fastest under load on two cores."""
    return _onnxruntime(launch, instances=cores(), threads=1, max_batch=MAX_BATCH)


def onnxruntime_backend_single_instance(launch: Launch) -> Command:
    """One instance on all cores without batches: fastest with one request in flight."""
    return _onnxruntime(launch, instances=1, threads=cores(), max_batch=0)


def _onnxruntime(launch: Launch, *, instances: int, threads: int, max_batch: int) -> Command:
    options = GRAPH.format(graph=launch.graph.name) + THREADS.format(threads=threads)
    if max_batch:
        options += BATCHING.format(delay=0)
    _repository(launch, "onnxruntime", options, instances=instances, max_batch=max_batch)
    folder = backends()
    if folder is None:
        raise FileNotFoundError(
            f"{BACKENDS_VARIABLE} names no folder with onnxruntime/libtriton_onnxruntime.so"
        )
    return Command([*_arguments(launch, folder), "--grpc-infer-allocation-pool-size=64"])


def _repository(launch: Launch, backend: str, options: str, *, instances: int, max_batch: int) -> Path:
    """Writes Triton's model repository, and returns the folder of the model's version."""
    model = launch.model
    version = launch.folder / "repository" / model.name / "1"
    shutil.rmtree(launch.folder / "repository", ignore_errors=True)
    version.mkdir(parents=True)
    for file in launch.graph.parent.iterdir():
        (version / file.name).symlink_to(file)
    # Without batches, the shape includes the batch axis.
    dims = f"-1, {model.width}" if max_batch else f"-1, -1, {model.width}"
    inputs = "".join(INPUT.format(name=name, dims=dims) for name in model.inputs)
    text = CONFIG.format(
        name=model.name,
        backend=backend,
        max_batch=max_batch,
        inputs=inputs,
        dims=dims,
        instances=instances,
    )
    (version.parent / "config.pbtxt").write_text(text + options)
    return version


def _arguments(launch: Launch, backends: Path) -> list[str | Path]:
    return [
        _site_packages(launch.home) / "pytriton/tritonserver/bin/tritonserver",
        f"--model-repository={launch.folder / 'repository'}",
        f"--backend-directory={backends}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={launch.port}",
        "--allow-http=false",
        "--allow-metrics=false",
    ]


def _site_packages(home: Path) -> Path:
    (found,) = home.glob("triton/lib/python3*/site-packages")
    return found
