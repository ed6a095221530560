"""What `--target triton` has written, in a real tritonserver with its C++ backend for ONNX Runtime."""

import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.export import write_target
from tests.support import deployment
from tests.support.deployment import CROSS, SELF
from tests.support.eager import assert_parity
from tests.support.processes import free_ports
from tests.support.triton import infer

# What tests/support/install_peers.sh installs. The backend is in no Python package: copy backends/onnxruntime
# from NVIDIA's image, with the ONNX Runtime that it links to.
PEERS = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache/attention-peers").resolve()
BACKENDS = PEERS / "triton-onnxruntime/backends"
START_SECONDS = 300
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not ((PEERS / "triton/bin/python").exists() and (BACKENDS / "onnxruntime").exists()),
        reason="Triton or its backend for ONNX Runtime is not installed: see tests/support/install_peers.sh",
    ),
]
MODELS = (SELF, CROSS)
LENGTHS = ((5, 3), (1, 7), (6, 6))


@contextmanager
def serving(repository: Path, log: Path, *options: str) -> Iterator[str]:
    """Starts tritonserver, and waits until its models are loaded. Yields its address."""
    (site,) = PEERS.glob("triton/lib/python3*/site-packages")
    tree, port = site / "pytriton/tritonserver", free_ports()[0]
    command: list[str | Path] = [
        tree / "bin/tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={BACKENDS}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--allow-http=false",
        "--allow-metrics=false",
        *options,
    ]
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while "Started GRPCInferenceService" not in log.read_text():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"tritonserver did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the export wrote."""
    folder = tmp_path_factory.mktemp("triton")
    for name in MODELS:
        write_target(deployment.link_model(name, folder), "triton")
        write_target(folder / name / "1", "onnx")  # a folder in which Triton must not see a version
    return folder


@pytest.fixture(scope="module", params=["config", "lengths"])
def triton(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, bool]]:
    """A server of one of the two configurations, and whether requests have key lengths."""
    options = ["--model-config-name=lengths"] if request.param == "lengths" else []
    with serving(repository, tmp_path_factory.mktemp("log") / "log", *options) as target:
        yield target, bool(options)


@pytest.mark.parametrize("name", MODELS)
def test_requests_of_unequal_lengths_equal_pytorch(
    triton: tuple[str, bool], repository: Path, name: str
) -> None:
    (target, padded), rng = triton, np.random.default_rng(0)
    inputs = [deployment.sequence(repository / name / "1", rng, *lengths) for lengths in LENGTHS]
    if padded:
        found = infer(target, name, padded_batch(inputs))["context_vectors"]
        rows = [vectors[: len(each["query"])] for vectors, each in zip(found, inputs, strict=True)]
    else:
        batches = [{key: array[None] for key, array in each.items()} for each in inputs]
        rows = [infer(target, name, batch)["context_vectors"][0] for batch in batches]
    assert_parity(rows, [deployment.eager(name, each) for each in inputs])


def padded_batch(inputs: list[deployment.Arrays]) -> dict[str, Any]:
    """One batch of all sequences, with the lengths of their last input."""
    batch = {}
    for name in inputs[0]:
        lengths = np.array([len(sequence[name]) for sequence in inputs])
        batch[name] = np.zeros((len(inputs), max(lengths), inputs[0][name].shape[1]), np.float32)
        for row, sequence in enumerate(inputs):
            batch[name][row, : lengths[row]] = sequence[name]
    return batch | {"key_lengths": lengths}
