"""The model archives in a real TorchServe, over REST and gRPC."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.export import write_target
from tests.support import deployment, torchserve
from tests.support.deployment import CROSS, ROTARY, SELF
from tests.support.eager import assert_parity

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not torchserve.is_installed(),
        reason="TorchServe is not installed: tests/support/install_peers.sh torchserve",
    ),
]
JSON = {"Content-Type": "application/json"}


def archive(name: str, repository: Path) -> tuple[Path, Path]:
    """The artifact and its archive."""
    artifact = deployment.link_model(name, repository)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", torchserve.path_with_archiver())
        (path,) = write_target(artifact, "torchserve")
    return artifact, path


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("name", [SELF, CROSS])
def test_rest_and_grpc_equal_pytorch_and_refuse_with_status_400(name: str, tmp_path: Path) -> None:
    artifact, path = archive(name, tmp_path / "repository")
    inputs = deployment.sequence(artifact, np.random.default_rng(0), 5, 3)
    eager = deployment.eager(name, inputs)
    body = json.dumps({key: array.tolist() for key, array in inputs.items()}).encode()
    with torchserve.serving(path, name, tmp_path) as server:
        status, content_type, reply = server.post(name, body, JSON)
        assert (status, content_type) == (200, "application/json")
        assert_parity(np.array(json.loads(reply)["context_vectors"]), eager)
        raw = server.predict(name, {key: array.tobytes() for key, array in inputs.items()})
        assert_parity(np.frombuffer(raw, "<f4").reshape(eager.shape), eager)
        status, _, reply = server.post(name, b'{"query": "text"}', JSON)
        assert (status, json.loads(reply)["code"]) == (400, 400)


def test_large_weights_are_in_the_archive(tmp_path: Path) -> None:
    artifact, path = archive(ROTARY, tmp_path / "repository")
    with zipfile.ZipFile(path) as mar:
        assert {"weights.bin", "golden.npz", "torchserve_config.yaml"} <= set(mar.namelist())
    inputs = deployment.sequence(artifact, np.random.default_rng(0), 9)
    with torchserve.serving(path, ROTARY, tmp_path) as server:
        reply = server.predict(ROTARY, {"data": npy(inputs["query"])})
    assert_parity(np.load(io.BytesIO(reply)), deployment.eager(ROTARY, inputs))
