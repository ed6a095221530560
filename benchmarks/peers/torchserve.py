"""Starts TorchServe for one ONNX graph of self-attention, with a handler that runs ONNX Runtime."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks.peers.launch import Command, Launch

HANDLER = Path(__file__).with_name("torchserve_handler.py")
MAX_BATCH = 32
DELAY_MILLISECONDS = 1
RESPONSE_SECONDS = 120
MAX_MESSAGE_BYTES = 200_000_000


def handler(launch: Launch) -> Command:
    """One worker that runs on all cores; TorchServe collects batches for at most a millisecond."""
    bin_folder = launch.home / "torchserve/bin"
    path = {"PATH": os.pathsep.join([str(bin_folder), os.environ["PATH"]])}
    archive = _archive(launch, bin_folder, path)
    (launch.folder / "config.properties").write_text(_properties(launch, archive))
    arguments: list[str | Path] = [
        bin_folder / "torchserve",
        "--foreground",
        "--ncs",
        "--model-store",
        launch.folder,
    ]
    arguments += ["--models", f"{launch.model.name}={archive}"]
    arguments += ["--ts-config", launch.folder / "config.properties"]
    logs = {"LOG_LOCATION": str(launch.folder), "METRICS_LOCATION": str(launch.folder)}
    return Command(arguments, {**path, **logs})


def _archive(launch: Launch, bin_folder: Path, environment: dict[str, str]) -> str:
    """Packs graph, external weights and handler into a model archive, and returns its name."""
    arguments: list[str | Path] = [bin_folder / "torch-model-archiver", "--force", "--version", "1.0"]
    arguments += ["--model-name", launch.model.name, "--serialized-file", launch.graph]
    arguments += ["--handler", HANDLER, "--export-path", launch.folder]
    weights = [file for file in launch.graph.parent.iterdir() if file.suffix in {".data", ".bin"}]
    if weights:
        arguments += ["--extra-files", ",".join(map(str, weights))]
    subprocess.run(arguments, check=True, env={**os.environ, **environment})  # noqa: S603 - the peer's command
    return f"{launch.model.name}.mar"


def _properties(launch: Launch, archive: str) -> str:
    settings = {
        "defaultVersion": True,
        "marName": archive,
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": MAX_BATCH,
        "maxBatchDelay": DELAY_MILLISECONDS,
        "responseTimeout": RESPONSE_SECONDS,
    }
    properties = {
        "grpc_inference_address": "127.0.0.1",
        "grpc_inference_port": launch.port,
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": launch.port + 1,
        "inference_address": f"http://127.0.0.1:{launch.port + 2}",
        "management_address": f"http://127.0.0.1:{launch.port + 3}",
        "metrics_address": f"http://127.0.0.1:{launch.port + 4}",
        "disable_token_authorization": "true",
        "max_request_size": MAX_MESSAGE_BYTES,
        "max_response_size": MAX_MESSAGE_BYTES,
        "models": json.dumps({launch.model.name: {"1.0": settings}}),
    }
    return "".join(f"{name}={value}\n" for name, value in properties.items())
