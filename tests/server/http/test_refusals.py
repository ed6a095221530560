"""Wrong requests of inference: status 400, and a message that names the field and the rule."""

import re
from typing import Any

import numpy as np
import pytest

from tests.server.http.clients import ask, binary_body
from tests.server.samples import CROSS, SELF, TEXT

PATH = f"/v2/models/{SELF}/infer"
MANY = 257


def changed(**members: Any) -> dict[str, Any]:
    """A good request with one input, of which some members are changed; None removes a member."""
    good = {"name": "query", "shape": [1, 2, 4], "datatype": "FP32", "data": [0.5] * 8}
    return {"inputs": [{key: value for key, value in {**good, **members}.items() if value is not None}]}


def requested(**members: Any) -> dict[str, Any]:
    return {**changed(), "outputs": [{"name": "context_vectors", **members}]}


def part(size: Any, shape: tuple[int, ...] = (1, 2, 4), **parameters: Any) -> dict[str, Any]:
    """A request whose input is binary."""
    return changed(data=None, shape=shape, parameters={"binary_data_size": size, **parameters})


def test_the_request_that_is_changed_is_good(port: int) -> None:
    assert ask(port, PATH, changed()).status == 200


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "inputs: is required"),
        (b"{", "body: is not JSON: "),
        (b"[]", "body: must be an object"),
        (b"\xff\xfe", "body: is not JSON: "),
        (b"[" * 5000, "body: is not JSON: depth limit exceeded"),
        (
            b'{"inputs": [NaN]}',
            "body: contains NaN or infinity, which JSON cannot express; send binary tensors",
        ),
        (b'{"inputs": [-Infinity]}', "body: contains NaN or infinity, which JSON cannot express"),
        (b'{"inputs": [1e999]}', "body: is not JSON: number is infinity"),
        ({"inputs": {}}, "inputs: must be an array"),
        ({"inputs": [7]}, "inputs[0]: must be an object"),
        ({"inputs": [{}] * MANY}, "inputs: has more than 256 entries"),
        (dict.fromkeys(map(str, range(MANY)), 0), "body: has 257 members; the limit is 256"),
        ({**changed(), "id": 7}, "id: must be a string"),
        ({**changed(), "outputs": "all"}, "outputs: must be an array"),
        ({**changed(), "outputs": [{}]}, "outputs[0].name: is required"),
        ({**changed(), "parameters": []}, "parameters: must be an object"),
        (
            {**changed(), "parameters": {"a": None}},
            "parameters[a]: must be a value of the type bool or int64 or string",
        ),
        ({**changed(), "parameters": {"a": [1]}}, "parameters[a]: must be a value of the type"),
        ({**changed(), "parameters": {"timeout": "5"}}, "timeout: must be an integer"),
        (
            {**changed(), "parameters": {"binary_data_output": 1}},
            "parameters[binary_data_output]: must be true or false",
        ),
        (
            {**changed(), "parameters": dict.fromkeys(map(str, range(MANY)), 1)},
            "parameters: has more than 256 entries",
        ),
        (changed(name=None), "inputs[0].name: is required"),
        (changed(name=3), "inputs[0].name: must be a string"),
        (changed(name="other"), "other: is not an input"),
        (changed(datatype=None), "inputs[0].datatype: is required"),
        (changed(datatype="FP8"), "query: FP8 has no form in JSON; send it with binary_data_size"),
        (changed(datatype="FP16"), "query: FP16 has no form in JSON; send it with binary_data_size"),
        (changed(shape=None), "inputs[0].shape: is required"),
        (changed(shape=[1, -2, 4]), "inputs[0].shape[1]: is -2; must be greater than or equal to 0"),
        (
            changed(shape=[1, 2**63, 4]),
            "inputs[0].shape[1]: is 9223372036854775808; must be less than or equal to",
        ),
        (changed(shape=[1, 2**64, 4]), "inputs[0].shape[1]: must be an integer"),
        (changed(shape=[1, 2.0, 4]), "inputs[0].shape[1]: must be an integer"),
        (changed(shape=[True, 2, 4]), "inputs[0].shape[0]: must be an integer"),
        (changed(shape=[1] * 65), "inputs[0].shape: has more than 64 entries"),
        (changed(shape=[1 << 40, 1 << 40, 4]), "query: has 8 elements; its shape is"),
        (changed(shape=[1, 3, 4]), "query: has 8 elements; its shape is [1, 3, 4]"),
        (changed(data=None), "query: has none of data, binary_data_size and shared_memory_region"),
        (changed(data=7), "query: data is a number; must be an array"),
        (changed(data={"a": 1}), "query: data is an object; must be an array"),
        (
            changed(data=[[[0.5] * 4, [0.5] * 3]]),
            "query: data has 3 entries on axis 2; its shape is [1, 2, 4]",
        ),
        (changed(data=[[0.5] * 8]), "query: data has 8 entries on axis 1; its shape is [1, 2, 4]"),
        (changed(data=[[[0.5] * 4, 0.5]]), "query: data has a number"),
        (changed(data=[0.5] * 7 + ["1"]), "query: data contains a string; FP32 takes numbers"),
        (changed(data=[0.5] * 7 + [None]), "query: data contains null; FP32 takes numbers"),
        (changed(data=[0.5] * 7 + [True]), "query: data contains a boolean; FP32 takes numbers"),
        (changed(data=[0.5] * 7 + [[]]), "query: data contains an array; FP32 takes numbers"),
        (changed(data=[0.5] * 7 + [1e39]), "query: data contains a number beyond the range of FP32"),
        (changed(datatype="INT64"), "query: data contains a number with a fraction or beyond 64 bits; INT64"),
        (changed(datatype="INT8", data=[128] * 8), "query: data contains a number beyond the range of INT8"),
        (changed(datatype="UINT8", data=[-1] * 8), "query: data contains a number beyond the range of UINT8"),
        (changed(datatype="BOOL", data=[1] * 8), "query: data contains a number; BOOL takes true and false"),
        (changed(datatype="BYTES", data=[1] * 8), "query: data contains a number; BYTES takes strings"),
        (
            changed(parameters={"shared_memory_region": "a"}),
            "query: has data and shared_memory_region of data, binary_data_size and shared_memory_region",
        ),
        (requested(name="other"), "outputs[other]: is unknown"),
        (requested(parameters={"binary_data": "yes"}), "outputs[0].parameters[binary_data]: must be true or"),
        (requested(parameters={"classification": 3}), "outputs[context_vectors].parameters[classification]:"),
        (requested(parameters={"datatype": "FP16"}), "outputs[context_vectors]: FP16 has no form in JSON"),
        ({**changed(), "parameters": {"sequence_id": 4}}, "parameters[sequence_id]: is not supported"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:70] if isinstance(value, str) else "",
)
def test_json(port: int, body: object, error: str) -> None:
    answer = ask(port, PATH, body, method="POST")
    assert answer.error.startswith(error)
    assert answer.status == 400


@pytest.mark.parametrize(
    ("document", "data", "error"),
    [
        (part(32), bytes(31), "query: has binary_data_size 32; the body has 31 bytes left for it"),
        (part(32), bytes(33), "body: has 33 bytes of binary data; the inputs use 32"),
        (part(24), bytes(24), "query: has 24 bytes; 1 x 2 x 4 elements of float32 need 32 bytes"),
        (part(-1), b"", "inputs[0].parameters[binary_data_size]: must be an integer, 0 or more"),
        (part("32"), bytes(32), "inputs[0].parameters[binary_data_size]: must be an integer"),
        (part(2**64), b"", "inputs[0].parameters[binary_data_size]: must be an integer"),
        (part(32, (2**40, 2**40, 4)), bytes(32), "query: contains 1099511627776 sequences;"),
        (changed(parameters={"binary_data_size": 32}), bytes(32), "query: has data and binary_data_size of"),
        (
            part(32, shared_memory_region="a"),
            bytes(32),
            "query: has binary_data_size and shared_memory_region of",
        ),
    ],
)
def test_binary(port: int, document: dict[str, Any], data: bytes, error: str) -> None:
    answer = ask(port, PATH, *binary_body(document, data))
    assert answer.error.startswith(error)
    assert answer.status == 400


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "99999999999999999999", "100000", "٣", "+5", ""])
def test_the_size_of_the_json(port: int, value: str) -> None:
    headers = {"Inference-Header-Content-Length": value.encode().decode("latin-1")}
    answer = ask(port, PATH, changed(), headers)
    assert answer.error.startswith("Inference-Header-Content-Length: ")
    assert answer.status == 400


def test_elements_of_bytes_that_overlap_their_end(port: int) -> None:
    document = changed(
        name="text", datatype="BYTES", shape=[1], data=None, parameters={"binary_data_size": 6}
    )
    answer = ask(port, f"/v2/models/{TEXT}/infer", *binary_body(document, b"\x03\0\0\0ab"))
    assert answer.error == "text: the element at byte 0 extends beyond the end of the data"
    assert answer.status == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", PATH, 405, "the method is GET; must be POST"),
        ("DELETE", "/v2/logging", 405, "the method is DELETE; must be "),
        ("POST", "/v2", 405, "must be GET"),
        ("GET", "/", 404, "there is no such path"),
        ("GET", "/v2/models", 404, "there is no such path"),
        ("POST", f"/v2/models/{SELF}/versions/7/infer", 404, "does not have version '7'"),
        ("GET", "/v2/models/%2e%2e", 404, "model '..' does not exist"),
        ("GET", "/v2/models/a%0ab", 404, "does not exist"),
    ],
)
def test_paths(port: int, method: str, path: str, status: int, error: str) -> None:
    answer = ask(port, path, changed() if method == "POST" else None, method=method)
    assert error in answer.error
    assert answer.status == status


def test_methods_that_the_server_lacks(port: int) -> None:
    answer = ask(port, "/v2/cudasharedmemory/region/a/register", {"raw_handle": {"b64": ""}, "byte_size": 1})
    assert answer.status == 501
    assert answer.error


def test_a_head_has_no_body(port: int) -> None:
    answer = ask(port, "/v2/health/live", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(b'{"live":true}'))


def test_a_limit_of_the_grpc_server(port: int) -> None:
    query = np.zeros((1, 8193, 4), np.float32)
    document = part(query.nbytes, query.shape)
    answer = ask(port, PATH, *binary_body(document, query.tobytes()))
    assert answer.status == 400
    assert "8192" in answer.error


@pytest.mark.parametrize("model", [SELF, TEXT, CROSS])
def test_embeddings_of_a_model_that_is_not_an_encoder(port: int, model: str) -> None:
    answer = ask(port, "/v1/embeddings", {"model": model, "input": "life is short"})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", "model")
    assert error["message"] == (
        f"model: {model!r} is not a text encoder; request its outputs with POST /v2/models/{model}/infer, "
        "or choose a model that GET /v1/models lists"
    )
    assert ask(port, "/v1/models").json == {"object": "list", "data": []}
    assert ask(port, f"/v1/models/{model}").json["error"]["code"] == "model_not_found"
