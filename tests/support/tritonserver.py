"""A real tritonserver on a model repository that `--target triton` has written.

Its C++ backend for ONNX Runtime is in no Python package. Without it, `for_python_backend` gives the same
configurations, models and files to the Python backend.
"""

import os
import shutil
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from benchmarks.processes import free_ports, running

# What tests/support/install_peers.sh installs.
PEERS = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache/attention-peers").resolve()
START_SECONDS = 300
MODEL = Path(__file__).with_name("triton_model.py")
BACKEND, FILE = 'backend: "onnxruntime"\n', "default_model_filename: "


def is_installed() -> bool:
    return (PEERS / "triton/bin/python").exists()


def for_python_backend(model: Path) -> None:
    """Changes the configurations of a model: the backend, which runs the graph that they name."""
    for config in [model / "config.pbtxt", *(model / "configs").glob("*.pbtxt")]:
        lines = config.read_text().splitlines(keepends=True)
        (graph,) = (line.removeprefix(FILE).strip() for line in lines if line.startswith(FILE))
        assert BACKEND in lines
        text = "".join(line for line in lines if not line.startswith(FILE)).replace(
            "onnxruntime", "python", 1
        )
        parameter = f'parameters {{ key: "graph" value {{ string_value: {graph} }} }}\n'
        config.write_text(text + parameter)
    for version in model.glob("[1-9]*"):
        shutil.copy(MODEL, version / "model.py")


@contextmanager
def serving(repository: Path, log: Path, *options: str) -> Iterator[str]:
    """Starts tritonserver, and waits until it answers. Yields its address; models may have failed to load."""
    (site,) = PEERS.glob("triton/lib/python3*/site-packages")
    tree, port = site / "pytriton/tritonserver", free_ports()[0]
    command: list[str | Path] = [
        tree / "bin/tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={tree / 'backends'}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--allow-http=false",
        "--allow-metrics=false",
        "--exit-on-error=false",
        *options,
    ]
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": os.pathsep.join([str(PEERS / "triton/bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(site),
    }
    with running(command, log, environment) as process:
        until = time.monotonic() + START_SECONDS
        while "Started GRPCInferenceService" not in log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"tritonserver did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"


def infer_at_once(target: str, model: str, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Sends requests of float tensors at the same time. Returns the first output of each."""
    with grpc.insecure_channel(target) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer.future
        replies = [call(_request(model, inputs), timeout=60) for inputs in requests]
        return [_first_output(reply.result()) for reply in replies]


def _request(model: str, inputs: Mapping[str, Any]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def _first_output(reply: pb.ModelInferResponse) -> Any:
    return np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(tuple(reply.outputs[0].shape))


def index(target: str) -> dict[str, tuple[str, str]]:
    """The state of each model and the reason for it."""
    with grpc.insecure_channel(target) as channel:
        reply = GRPCInferenceServiceStub(channel).RepositoryIndex(pb.RepositoryIndexRequest(), timeout=30)
    return {model.name: (model.state, model.reason) for model in reply.models}
