"""A real TorchServe with one model archive, and requests over its REST and gRPC APIs."""

import http.client
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import wrappers_pb2

from attention_serving.server.api import protobuf_bytes
from benchmarks.processes import free_ports, running

BIN = "torchserve/bin"
# What tests/support/install_peers.sh installs.
PEERS = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache/attention-peers").resolve()
START_SECONDS = 300
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def is_installed() -> bool:
    return (PEERS / BIN / "torchserve").exists()


def path_with_archiver() -> str:
    """A PATH on which torch-model-archiver is found."""
    return os.pathsep.join([str(PEERS / BIN), os.environ["PATH"]])


@dataclass(frozen=True)
class TorchServe:
    """A server on loopback: gRPC on `port`, REST on the port after it."""

    port: int

    def post(
        self, model: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, bytes]:
        """Returns the status, content type and body of a prediction over REST."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port + 1, timeout=120)
        try:
            connection.request("POST", f"/predictions/{model}", body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.headers.get("Content-Type", ""), response.read()
        finally:
            connection.close()

    def predict(self, model: str, inputs: Mapping[str, bytes]) -> bytes:
        """Returns a prediction over gRPC."""
        # PredictionsRequest: model_name = 1, map<string, bytes> input = 3. Its answer: prediction = 1.
        entries = [_field(3, _field(1, name.encode()) + _field(2, data)) for name, data in inputs.items()]
        request = _field(1, model.encode()) + b"".join(entries)
        return bytes(wrappers_pb2.BytesValue.FromString(self._call(request)).value)

    @cached_property
    def _call(self) -> Any:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", [("grpc.max_receive_message_length", -1)])
        return channel.unary_unary(PREDICTIONS)


@contextmanager
def serving(archive: Path, model: str, folder: Path) -> Iterator[TorchServe]:
    """Starts TorchServe with one archive, and waits until the model is ready or its worker has failed.

    Args:
        archive: The .mar file.
        model: Its name.
        folder: For logs and the server's own files.
    """
    port, grpc_management, inference, management, metrics = free_ports(5)
    properties = {
        "grpc_inference_address": "127.0.0.1",
        "grpc_inference_port": port,
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": grpc_management,
        "inference_address": f"http://127.0.0.1:{inference}",
        "management_address": f"http://127.0.0.1:{management}",
        "metrics_address": f"http://127.0.0.1:{metrics}",
        "disable_token_authorization": "true",
        "vmargs": f"-Djava.io.tmpdir={folder}",  # of unpacked archives and sockets, which have fixed names
    }
    configuration = folder / "config.properties"
    configuration.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    command: list[str | Path] = [PEERS / BIN / "torchserve", "--foreground", "--ncs"]
    command += ["--model-store", archive.parent, "--models", f"{model}={archive.name}"]
    command += ["--ts-config", configuration]
    environment = {**os.environ, "PATH": path_with_archiver(), "TMPDIR": str(folder)}
    environment |= {"LOG_LOCATION": str(folder), "METRICS_LOCATION": str(folder)}
    environment.pop("PYTHONPATH", None)
    log = folder / "torchserve.log"
    with running(command, log, environment, folder) as process:
        until = time.monotonic() + START_SECONDS
        while not _is_settled(log):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"TorchServe did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield TorchServe(port)


def _is_settled(log: Path) -> bool:
    text = log.read_text()
    return "WORKER_STARTED -> WORKER_MODEL_LOADED" in text or "WORKER_ERROR -> WORKER_STOPPED" in text


def _field(number: int, content: bytes) -> bytes:
    """A field of TorchServe's messages, whose definitions may not be installed."""
    return b"".join(protobuf_bytes.field((number,), [content]))
