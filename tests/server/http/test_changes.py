"""What changes a running server, through tritonclient.http: models, shared memory, the log, statistics."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from scripts.local_server import ServerProcess, serving
from tests.server.http.clients import HOST, http_port
from tests.server.samples import SELF

QUERY = np.random.default_rng(0).standard_normal((1, 5, 4), np.float32)


@pytest.fixture(scope="module")
def server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that loads models on request, and takes tensors in shared memory."""
    folder = tmp_path_factory.mktemp("changes")
    copytree(artifacts / SELF, folder / "models" / SELF)
    options = ("--http-port=0", "--model-control=explicit", f"--load-model={SELF}", "--allow-shared-memory")
    with serving(folder / "models", folder / "log", *options) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(f"{HOST}:{http_port(server.log)}") as client:
        yield client


def infer(client: Any) -> Any:
    tensor = triton.InferInput("query", QUERY.shape, "FP32")
    tensor.set_data_from_numpy(QUERY)
    return client.infer(SELF, [tensor]).as_numpy("context_vectors")


def test_models_are_unloaded_and_loaded(client: Any) -> None:
    expected = infer(client)
    ready = {"name": SELF, "version": "1", "state": "READY", "reason": ""}
    assert client.get_model_repository_index() == [ready]
    client.unload_model(SELF)
    assert not client.is_model_ready(SELF)
    with pytest.raises(InferenceServerException, match=f"model {SELF!r} does not exist"):
        infer(client)
    client.load_model(SELF)
    np.testing.assert_array_equal(infer(client), expected)
    with pytest.raises(InferenceServerException, match="'nonesuch' does not exist in the repository"):
        client.load_model("nonesuch")


def test_statistics(client: Any) -> None:
    def requests() -> int:
        (model,) = client.get_inference_statistics(SELF)["model_stats"]
        return int(model["inference_stats"].get("success", {}).get("count", 0))

    before = requests()
    infer(client)
    assert requests() == before + 1


def test_the_level_of_the_log(client: Any, server: ServerProcess) -> None:
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    client.is_server_ready()
    assert "call ended" in server.log.read_text()
    assert client.update_log_settings({"log_verbose_level": 0})["log_verbose_level"] == 0


def test_tensors_in_shared_memory(client: Any) -> None:
    expected = infer(client)
    regions = [
        shared_memory.create_shared_memory_region(name, f"/http-test-{name}", QUERY.nbytes)
        for name in ("in", "out")
    ]
    try:
        shared_memory.set_shared_memory_region(regions[0], [QUERY])
        for name in ("in", "out"):
            client.register_system_shared_memory(name, f"/http-test-{name}", QUERY.nbytes)
        assert {region["name"] for region in client.get_system_shared_memory_status()} == {"in", "out"}
        tensor = triton.InferInput("query", QUERY.shape, "FP32")
        tensor.set_shared_memory("in", QUERY.nbytes)
        wanted = triton.InferRequestedOutput("context_vectors")
        wanted.set_shared_memory("out", QUERY.nbytes)
        client.infer(SELF, [tensor], outputs=[wanted])
        found = shared_memory.get_contents_as_numpy(regions[1], np.float32, expected.shape)
        np.testing.assert_array_equal(found, expected)
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    finally:
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)
