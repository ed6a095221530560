"""The model archives in a real TorchServe, over REST and gRPC."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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
LENGTHS = ((5, 3), (1, 7), (6, 6), (12, 2), (3, 9), (8, 8), (2, 5), (7, 1))
# Requests that are sent together are handled together, however slowly they arrive.
BATCHING = {"batchSize: 32": f"batchSize: {len(LENGTHS)}", "maxBatchDelay: 1\n": "maxBatchDelay: 60000\n"}


class Served(NamedTuple):
    """A model in a running server."""

    name: str
    artifact: Path
    server: torchserve.TorchServe


def archive(name: str, repository: Path) -> tuple[Path, Path]:
    """The artifact and its archive."""
    artifact = deployment.link_model(name, repository)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", torchserve.path_with_archiver())
        (path,) = write_target(artifact, "torchserve")
    return artifact, path


def rewritten(archive: Path, folder: Path, file: str, changes: Mapping[str, str]) -> Path:
    """A copy of an archive with changes in one of its text files."""
    with zipfile.ZipFile(archive) as mar:
        files = {name: mar.read(name) for name in mar.namelist()}
    text = files[file].decode()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir()
    with zipfile.ZipFile(folder / archive.name, "w") as mar:
        for name, content in (files | {file: text.encode()}).items():
            mar.writestr(name, content)
    return folder / archive.name


@pytest.fixture(scope="module", params=[SELF, CROSS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("torchserve")
    artifact, path = archive(request.param, folder / "repository")
    batching = rewritten(path, folder / "store", "torchserve_config.yaml", BATCHING)
    with torchserve.serving(batching, request.param, folder) as server:
        yield Served(request.param, artifact, server)


@pytest.fixture
def inputs(served: Served) -> list[deployment.Arrays]:
    """Sequences of different lengths, as many as the server collects."""
    rng = np.random.default_rng(0)
    return [deployment.sequence(served.artifact, rng, *lengths) for lengths in LENGTHS]


def together(send: Callable[[Any], Any], requests: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_every_form_over_rest_and_grpc_equals_pytorch(
    served: Served, inputs: list[deployment.Arrays]
) -> None:
    server, name = served.server, served.name
    eager = [deployment.eager(name, each) for each in inputs]
    bodies = [json.dumps({key: array.tolist() for key, array in each.items()}).encode() for each in inputs]
    headers = {"Content-Type": "application/json"}
    replies = together(lambda body: server.post(name, body, headers), bodies)
    assert {reply[:2] for reply in replies} == {(200, "application/json")}
    assert_parity([np.array(json.loads(body)["context_vectors"]) for _, _, body in replies], eager)

    fields = [{key: array.tobytes() for key, array in each.items()} for each in inputs]
    raw = together(lambda each: server.predict(name, each), fields)
    shaped = [np.frombuffer(reply, "<f4").reshape(own.shape) for reply, own in zip(raw, eager, strict=True)]
    assert_parity(shaped, eager)


def test_unequal_lengths_and_a_bad_request_in_one_batch(
    served: Served, inputs: list[deployment.Arrays]
) -> None:
    requests = [{name: npy(array) for name, array in each.items()} for each in inputs]
    requests[3]["query"] = npy(np.zeros((2, 3), np.float32))
    replies = together(lambda fields: served.server.predict(served.name, fields), requests)

    assert json.loads(replies.pop(3))["message"].startswith("query has shape [2, 3]; it must be one sequence")
    eager = [deployment.eager(served.name, each) for index, each in enumerate(inputs) if index != 3]
    assert_parity([np.load(io.BytesIO(reply)) for reply in replies], eager)
    batches = served.server.batch_sizes(3 * len(LENGTHS))  # of this test and the one above
    assert batches == [len(LENGTHS)] * 3


def test_a_refused_request_has_status_400(served: Served) -> None:
    body, headers = json.dumps({"query": "text"}).encode(), {"Content-Type": "application/json"}
    replies = together(lambda each: served.server.post(served.name, each, headers), [body] * len(LENGTHS))
    for status, content_type, reply in replies:
        assert (status, content_type) == (400, "application/json")
        assert "query must be a nested list of numbers" in json.loads(reply)["message"]


def test_large_weights_are_in_the_archive(tmp_path: Path) -> None:
    artifact, path = archive(ROTARY, tmp_path / "repository")
    with zipfile.ZipFile(path) as mar:
        names = set(mar.namelist())
        manifest = json.loads(mar.read("MAR-INF/MANIFEST.json"))
        assert json.loads(mar.read("manifest.json")) == json.loads((artifact / "manifest.json").read_text())
    assert {"weights.bin", "golden.npz", "torchserve_handler.py", "torchserve_config.yaml"} <= names
    assert (manifest["model"]["modelName"], manifest["model"]["modelVersion"]) == (ROTARY, "1")

    inputs = deployment.sequence(artifact, np.random.default_rng(0), 9)
    with torchserve.serving(path, ROTARY, tmp_path) as server:
        reply = server.predict(ROTARY, {"data": npy(inputs["query"])})
    assert_parity(np.load(io.BytesIO(reply)), deployment.eager(ROTARY, inputs))
