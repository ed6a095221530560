"""Models are loaded and unloaded through tritonclient.http; what is not a name is refused."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripts.local_server import ServerProcess, serving
from tests.server.http.clients import HOST, http_port
from tests.server.samples import SELF
from tests.server.seams import PATIENCE_SECONDS

QUERY = np.random.default_rng(0).standard_normal((1, 5, 4), np.float32)


@pytest.fixture(scope="module")
def server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that loads models on request."""
    folder = tmp_path_factory.mktemp("changes")
    copytree(artifacts / SELF, folder / "models" / SELF)
    options = ("--http-port=0", "--model-control=explicit", f"--load-model={SELF}")
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


@pytest.mark.parametrize("change", ["load", "unload"])
@pytest.mark.parametrize(
    "name",
    [
        "../outside/x",
        "..",
        ".hidden",
        "a/b",
        "/etc",
        "zero\0byte",
        "line\nbreak",
        "modèle",
        "%ff",
        "x" * 5000,
    ],
)
def test_what_is_not_a_name_is_refused_over_both_protocols(
    server: ServerProcess, name: str, change: str
) -> None:
    encoded = name if name == "%ff" else quote(name, safe="")
    url = f"http://{HOST}:{http_port(server.log)}/v2/repository/models/{encoded}/{change}"
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(url, b"{}"), timeout=PATIENCE_SECONDS)
    # A slash in a name is one in the path, which has no such route.
    assert refused.value.code == (404 if "/" in name else 400)
    assert len(refused.value.read()) < 500
    with grpc.insecure_channel(server.target) as channel:
        method: Any = getattr(GRPCInferenceServiceStub(channel), f"RepositoryModel{change.title()}")
        message = getattr(pb, f"RepositoryModel{change.title()}Request")(model_name=name)
        with pytest.raises(grpc.RpcError) as error:
            method(message, timeout=PATIENCE_SECONDS)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.value.details()).startswith("model_name: is '")
    assert len(str(error.value.details())) < 250
