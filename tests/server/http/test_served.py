"""HTTP in front of a real gRPC server: the numbers of gRPC, rights, and the page that draws attention."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, InvalidArgumentError
from tritonclient import http as triton

from attention_serving.artifact.manifest import MANIFEST_FILE, file_hash
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.guard import Guard
from tests.server.http.clients import HOST, Array, answer_on, ask, connected, head, tensor
from tests.server.http.scripted import front
from tests.server.samples import CROSS, SELF
from tests.server.seams import Served
from tests.server.security.samples import entry, watched, write_tokens

RNG = np.random.default_rng(5)
QUERY = RNG.standard_normal((2, 3, 4), dtype=np.float32)
KEY = RNG.standard_normal((2, 5, 6), dtype=np.float32)
VALUE = RNG.standard_normal((2, 5, 5), dtype=np.float32)
WEIGHTS, CONTEXT = "attention_weights", "context_vectors"
INFER, PATH = f"/v2/models/{SELF}/infer", f"/v2/models/{CROSS}"
BODY = {"inputs": [tensor("query", QUERY)]}
ENTRIES = (
    entry("all", "all-token", "infer:*", "read", "admin"),
    entry("caller", "caller-token", f"infer:{SELF}"),
    entry("reader", "reader-token", f"read:{SELF}"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(self_model: LoadedModel, cross_model: LoadedModel, folder: Path) -> Iterator[Served]:
    """A server that knows some identities."""
    table = watched(write_tokens(folder / "tokens.json", *ENTRIES))
    with Served(self_model, cross_model, guard=Guard(table), unix_socket=folder / "grpc") as served:
        yield served
    table.close()


@pytest.fixture(scope="module")
def port(folder: Path, served: Served) -> Iterator[int]:  # noqa: ARG001 - which serves
    with front(f"unix:{folder}/grpc", tokens="unread", http_explore=True, http_port=0) as running:
        yield running.port


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize(
    ("model", "arrays"), [(SELF, {"query": QUERY}), (CROSS, {"query": QUERY, "key": KEY, "value": VALUE})]
)
def test_tritonclient_receives_the_numbers_of_grpc(
    served: Served, port: int, model: str, arrays: dict[str, Array], binary: bool
) -> None:
    with AttentionClient(served.target, token="all-token") as over_grpc:  # noqa: S106 - of a test
        expected = over_grpc.attend(model, *arrays.values(), return_weights=True)
    tensors = [triton.InferInput(name, list(array.shape), "FP32") for name, array in arrays.items()]
    for tensor_, array in zip(tensors, arrays.values(), strict=True):
        tensor_.set_data_from_numpy(array, binary_data=binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in (WEIGHTS, CONTEXT)]
    options = {"outputs": outputs, "request_id": "7", "request_compression_algorithm": "gzip"}
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
        result = client.infer(model, tensors, "1", headers=bearer("all-token"), **options)
        np.testing.assert_array_equal(result.as_numpy(CONTEXT), expected.context_vectors)
        np.testing.assert_array_equal(result.as_numpy(WEIGHTS), expected.attention_weights)
        assert result.get_response()["id"] == "7"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_replies_and_refusals_state_the_digest(served: Served, port: int, artifacts: Path) -> None:
    with AttentionClient(served.target, token="all-token") as client:  # noqa: S106 - of a test
        digests = [client.model(SELF).digest, client.attend(SELF, QUERY).model_digest]
        digests += [client.infer(SELF, {"query": QUERY}).model_digest]
        with pytest.raises(InvalidArgumentError, match="query") as caught:
            client.attend(SELF, KEY)
    digests.append(caught.value.model_digest)
    for path, body, member in ((f"/v2/models/{SELF}", None, "properties"), (INFER, BODY, "parameters")):
        digests.append(ask(port, path, body, bearer("all-token")).json[member]["model_digest"])
    assert set(digests) == {file_hash(artifacts / SELF / "1" / MANIFEST_FILE)}


def test_a_request_without_a_body_is_refused_at_once(port: int) -> None:
    with connected(port) as connection:
        for _ in range(2):  # on the same connection: there was nothing to read and to drop
            connection.sendall(head("/v2", method="GET"))
            answer = answer_on(connection)
            assert answer.status == 401
            assert "connection" not in answer.headers


LARGE, CALLER = "Content-Length: 1048576", "Authorization: Bearer caller-token"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (INFER, [LARGE], 401),
        (INFER, [LARGE, "Authorization: Bearer reader-token"], 403),
        (f"{PATH}/infer", [LARGE, CALLER], 403),
        (f"{PATH}/contexts", [LARGE, CALLER], 403),
        (f"/v2/repository/models/{SELF}/load", [LARGE, CALLER], 403),
        ("/v1/embeddings", [LARGE], 401),
        (INFER, ["Transfer-Encoding: chunked"], 401),
        (INFER, ["Content-Encoding: gzip", "Content-Length: 100"], 401),
    ],
)
def test_a_large_body_is_refused_unread(port: int, path: str, headers: list[str], status: int) -> None:
    """Only the head is sent: it announces a body that may be large and never comes."""
    with connected(port) as connection:
        connection.sendall(head(path, "Expect: 100-continue", *headers))
        assert answer_on(connection).status == status


def test_a_large_body_of_a_known_caller_is_answered(port: int) -> None:
    body = {"inputs": [tensor("query", np.ones((200, 100, 4), np.float32))]}
    assert ask(port, INFER, body, bearer("caller-token")).status == 200


def test_the_models_of_the_explorer_are_those_that_the_caller_may_read(served: Served, port: int) -> None:
    (described,) = ask(port, "/explore/models", headers=bearer("reader-token")).json["models"]
    with AttentionClient(served.target, token="reader-token") as client:  # noqa: S106 - of a test
        (model,) = client.models()
    assert (described["name"], described["version"]) == (SELF, model.version)
    assert described["state"] == "STATE_READY"
    assert described["attention_patterns"] == [asdict(pattern) for pattern in model.attention_patterns]
    assert [output["name"] for output in described["outputs"]] == [CONTEXT, WEIGHTS]


def test_the_page_of_the_explorer_needs_no_token_and_is_the_clients(port: int) -> None:
    answer = ask(port, "/explore")
    page = Path(__file__).parents[3] / "clients/python/src/attention_client/_explorer.html"
    assert (answer.status, answer.body) == (200, page.read_bytes())
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
