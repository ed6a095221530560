"""Inference over HTTP: the same numbers as over gRPC, in JSON and in binary."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from scripts.local_server import ServerProcess
from tests.server.http.clients import HOST, Array, ask, binary_body, tensor
from tests.server.samples import CROSS, SELF, TEXT
from tests.support import open_inference

RNG = np.random.default_rng(5)
QUERY = RNG.standard_normal((2, 3, 4), dtype=np.float32)
KEY = RNG.standard_normal((2, 5, 6), dtype=np.float32)
VALUE = RNG.standard_normal((2, 5, 5), dtype=np.float32)
LENGTHS = np.array([3, 2])
MASK = RNG.random((2, 3, 3)) < 0.7
WEIGHTS, CONTEXT = "attention_weights", "context_vectors"
SELF_PATH = f"/v2/models/{SELF}/infer"
CASES = [
    pytest.param(SELF, {"query": QUERY}, [CONTEXT], id="self-attention"),
    pytest.param(SELF, {"query": QUERY}, [WEIGHTS, CONTEXT], id="weights"),
    pytest.param(SELF, {"query": QUERY, "key_lengths": LENGTHS}, [CONTEXT], id="lengths"),
    pytest.param(SELF, {"attention_mask": MASK, "query": QUERY}, [CONTEXT], id="mask"),
    pytest.param(
        CROSS, {"value": VALUE, "key": KEY, "query": QUERY}, [CONTEXT, WEIGHTS], id="cross-attention"
    ),
]


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
        yield client


def infer(
    client: Any, model: str, inputs: dict[str, Array], outputs: list[str], *, binary: bool, **options: Any
) -> dict[str, Array]:
    tensors = []
    for name, array in inputs.items():
        made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array, binary_data=binary)
        tensors.append(made)
    requested = [triton.InferRequestedOutput(name, binary_data=binary) for name in outputs]
    result = client.infer(model, tensors, outputs=requested, **options)
    return {name: result.as_numpy(name) for name in outputs}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize(("model", "inputs", "outputs"), CASES)
def test_tritonclient_receives_the_numbers_of_grpc(
    small_server: ServerProcess,
    client: Any,
    model: str,
    inputs: dict[str, Array],
    outputs: list[str],
    binary: bool,
) -> None:
    found = infer(client, model, inputs, outputs, binary=binary)
    expected = open_inference.infer(small_server.target, model, inputs, outputs)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_texts(client: Any, binary: bool) -> None:
    texts = np.array([b"Life is short", b"eat dessert"], dtype=object)
    found = infer(client, TEXT, {"text": texts}, ["lengths", CONTEXT], binary=binary)
    assert found["lengths"].tolist() == [3, 2]
    assert found[CONTEXT].shape[:2] == (2, 3)
    assert not found[CONTEXT][1, 2:].any()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_tritonclient_compresses_requests(client: Any, algorithm: str) -> None:
    options = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    found = infer(client, SELF, {"query": QUERY}, [CONTEXT], binary=True, **options)
    expected = infer(client, SELF, {"query": QUERY}, [CONTEXT], binary=True)
    np.testing.assert_array_equal(found[CONTEXT], expected[CONTEXT])


def test_tritonclient_requests_all_outputs_in_binary_by_default(client: Any) -> None:
    made = triton.InferInput("query", list(QUERY.shape), "FP32").set_data_from_numpy(QUERY)
    result = client.infer(SELF, [made], request_id="7", model_version="1")
    response = result.get_response()
    assert response["id"] == "7"
    assert response["model_version"] == "1"
    assert response["outputs"][0]["parameters"] == {"binary_data_size": QUERY.nbytes}


def test_half_precision_is_binary(small_server: ServerProcess, client: Any) -> None:
    half = QUERY.astype(np.float16)
    found = infer(client, SELF, {"query": half}, [CONTEXT], binary=True)[CONTEXT]
    inputs = {"query": half.astype(np.float32)}
    expected = open_inference.infer(small_server.target, SELF, inputs, [CONTEXT])[CONTEXT]
    np.testing.assert_array_equal(found, expected)


def test_tritonclient_raises_with_status_and_message(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(client, "absent", {"query": QUERY}, [CONTEXT], binary=True)
    assert caught.value.status() == "404"
    assert "model 'absent' does not exist" in caught.value.message()


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_a_compressed_chunked_body(port: int, encoding: str, compress: Any) -> None:
    plain = ask(port, SELF_PATH, {"inputs": [tensor("query", QUERY)]})
    body = compress(b'{"inputs": [%s]}' % json.dumps(tensor("query", QUERY)).encode())
    chunks = iter([body[at : at + 7] for at in range(0, len(body), 7)])
    found = ask(port, SELF_PATH, chunks, {"Content-Encoding": encoding})
    assert found.status == 200
    assert found.json["outputs"] == plain.json["outputs"]


def test_a_timeout_passes(port: int) -> None:
    document = {"inputs": [tensor("query", QUERY)], "parameters": {"timeout": 1}}
    found = ask(port, SELF_PATH, document)
    assert found.status in (429, 504)  # it cannot be met, or has passed
    assert found.error


def test_infinity_has_no_form_in_json(port: int) -> None:
    query = np.full((1, 1, 4), np.inf, np.float32).tobytes()
    part = {"name": "query", "shape": [1, 1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    found = ask(port, SELF_PATH, *binary_body({"inputs": [part]}, query))
    assert found.status == 400
    says = "contains NaN or infinity, which JSON cannot express; request it with binary_data"
    assert found.error == f"outputs[context_vectors]: {says}"
    document = {"inputs": [part], "parameters": {"binary_data_output": True}}
    assert ask(port, SELF_PATH, *binary_body(document, query)).status == 200
