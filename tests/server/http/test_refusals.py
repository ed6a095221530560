"""Requests that are refused before a call of the gRPC server: status, error, and what the headers add."""

import gzip
from typing import Any

import numpy as np
import pytest

from tests.server.http.clients import INFER, MAX_BYTES, REQUEST, ask, tensor
from tests.server.http.scripted import Scripted

MODEL, CONTEXTS = "/v2/repository/models/m/load", "/v2/models/m/versions/2/contexts"
REGION = "/v2/systemsharedmemory/region/a/register"
MASK = {"name": "mask", "shape": [3], "datatype": "BOOL", "data": [True, False, True]}
BATCH = MASK | {"shape": [1, 3]}
SHARED = {"name": "key", "shape": [3, 4], "datatype": "FP32", "parameters": {"shared_memory_region": "a"}}
GZIP, SIZE = {"Content-Encoding": "gzip"}, "Inference-Header-Content-Length"
SIZES = ("0", "-1", "99999999999999999999", "100000", "٣".encode().decode("latin-1"))
INTEGERS = b'{"inputs":[{"name":"a","shape":[300000],"datatype":"INT64","data":[0%s]}]}' % (b",0" * 299_999)
NOT_ASCII = "authorization: contains characters other than printable ASCII"


def key(*shape: int, **members: str) -> dict[str, Any]:
    return tensor("key", np.zeros(shape, np.float32)) | members


def context(*inputs: object, **parameters: object) -> dict[str, object]:
    return {"parameters": parameters, "inputs": inputs}


# Path, body, headers, status, and the beginning of the error.
ROWS: list[tuple[str, Any, dict[str, str] | None, int, str]] = [
    (INFER, gzip.compress(bytes(100 * MAX_BYTES)), GZIP, 413, "the body is larger than the limit"),
    (INFER, b"{}", GZIP, 400, "Content-Encoding: the body is damaged"),
    (INFER, gzip.compress(b"{}")[:-4], GZIP, 400, "Content-Encoding: the compressed body ends too early"),
    (INFER, gzip.compress(b"{}") * 2, GZIP, 400, "Content-Encoding: data follow the compressed body"),
    (INFER, b"{}", {"Content-Encoding": "br"}, 415, "Content-Encoding: is 'br'; must be gzip, deflate or"),
    (INFER, b"{}", {"Content-Encoding": "x" * 500}, 415, f"Content-Encoding: is '{'x' * 100}'; must"),
    *((INFER, REQUEST, {SIZE: size}, 400, f"{SIZE}: ") for size in SIZES),
    (INFER, INTEGERS, None, 413, f"the tensors have 2400025 bytes as a message; the limit is {MAX_BYTES}"),
    ("/v2/repository/index", {"ready": 1}, None, 400, "ready: must be a valid boolean"),
    (MODEL, {"parameters": {"a": 1.5}}, None, 400, "parameters[a]: must be a value of the"),
    (REGION, {"key": "a"}, None, 400, "byte_size: is required"),
    ("/v2/logging", {}, None, 405, "/v2/logging: the method is POST; must be GET, HEAD"),
    ("/v2/models", None, None, 404, "/v2/models: there is no such path"),
    ("/explore", None, None, 404, "/explore: there is no such path"),  # off unless a setting switches it on
    # To repeat the request would not help, which 429 would say.
    (INFER, REQUEST, {"Authorization": "x" * 7600}, 431, "the headers that are passed on take 77"),
    (INFER, REQUEST, {"Authorization": "Bearer \xe4"}, 400, NOT_ASCII),
    (INFER, REQUEST, {"Authorization": "Bearer a\tb"}, 400, NOT_ASCII),
    (CONTEXTS, context(key(3, 4), ttl_seconds=2**32), None, 400, "parameters[ttl_seconds]: must be less"),
    (CONTEXTS, context(key(3, 4), ttl=1), None, 400, "parameters[ttl]: is unknown"),
    (CONTEXTS, context(key(3, 4, name="query")), None, 400, "query: is unknown or given twice"),
    (CONTEXTS, context(key(3, 4), key(3, 4)), None, 400, "key: is unknown or given twice"),
    (CONTEXTS, context(key(2, 3, 2)), None, 400, "key: is FP32 of the shape [2, 3, 2]; must be"),
    (CONTEXTS, context(key(12)), None, 400, "key: is FP32 of the shape [12]; must be"),
    (CONTEXTS, context(key(3, 4, datatype="FP64")), None, 400, "key: is FP64 of the shape [3, 4]; must be"),
    (CONTEXTS, context(BATCH), None, 400, "mask: is BOOL of the shape [1, 3]; must be BOOL (rows)"),
    (CONTEXTS, context(key(2, 4), MASK), None, 400, "inputs: have different numbers of rows"),
    (CONTEXTS, context(SHARED), None, 400, "inputs: must not be in shared memory"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "error"), ROWS, ids=[row[-1] for row in ROWS])
def test_a_request_is_refused(
    scripted: Scripted, port: int, path: str, body: Any, headers: Any, status: int, error: str
) -> None:
    answer = ask(port, path, body, headers)
    assert answer.status == status
    assert answer.error.startswith(error)
    assert ("accept-encoding" in answer.headers) is (status == 415)
    assert ("allow" in answer.headers) is (status == 405)
    assert scripted.calls.empty()
