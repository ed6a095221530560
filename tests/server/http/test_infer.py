"""Bodies of inference and of contexts: the messages that they become, errors of others, and replies."""

import json
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference.requests import BYTES
from attention_serving.server.api.schemas import memory_of
from attention_serving.server.api.tensors import DTYPE_BY_NAME, NAME_BY_DTYPE
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.http.infer import InferenceHeader, decode, encode, to_bytes, to_json
from tests.server.api.messages import vectors
from tests.server.http.clients import MAX_BYTES, ask, binary_body, tensor
from tests.server.http.scripted import Scripted
from tests.support.refusals import expect_refusal

QUERY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
MANY = 257


def memory() -> Reservation:
    return Reservation(MemoryBudget(64 * MAX_BYTES))


def decoded(
    body: Any, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[pb.ModelInferRequest, InferenceHeader]:
    """The message of a body, which may be a document, and what the JSON says; the header has its size."""
    data = bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
    message, head = decode(data, int(*headers.values()) or len(data), "m", "2", MAX_BYTES, memory())
    return pb.ModelInferRequest.FromString(message), head


SHARED = {"shared_memory_region": "a", "shared_memory_byte_size": 96, "shared_memory_offset": 4}
DESCRIBED = {"shape": [2, 3, 4], "datatype": "FP32"}
DOCUMENT = {
    "id": "7",
    "parameters": {"timeout": 5, "a": True, "b": 1.5, "c": "x", "d": 2**64 - 1, "binary_data_output": True},
    "inputs": [
        tensor("json", QUERY),
        {"name": "shared", **DESCRIBED, "parameters": SHARED},
        {"name": "binary", **DESCRIBED, "parameters": {"binary_data_size": 96, "p": -3}},
        {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["ä", ""]},
    ],
    "outputs": [
        {"name": "x", "parameters": {"binary_data": False, "datatype": "FP16"}},
        {"name": "y", "parameters": SHARED},
    ],
}
Choice = pb.InferParameter


def test_a_body_becomes_raw_contents() -> None:
    request, head = decoded(*binary_body(DOCUMENT, (-QUERY).tobytes()))
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    kinds = {"timeout": "int64", "a": "bool", "b": "double", "c": "string", "d": "uint64"}
    choices = {name: value.WhichOneof("parameter_choice") for name, value in request.parameters.items()}
    assert choices == {name: f"{kind}_param" for name, kind in kinds.items()}
    assert [tensor.name for tensor in request.inputs] == ["json", "shared", "binary", "text"]
    assert request.inputs[1].parameters["shared_memory_offset"].int64_param == 4
    assert dict(request.inputs[2].parameters) == {"p": Choice(int64_param=-3)}
    texts = b"\x02\0\0\0\xc3\xa4\0\0\0\0"
    assert list(request.raw_input_contents) == [QUERY.tobytes(), (-QUERY).tobytes(), texts]
    assert dict(request.outputs[0].parameters) == {"datatype": Choice(string_param="FP16")}
    assert set(request.outputs[1].parameters) == set(SHARED)
    assert (head.binary, head.outputs) == (True, {"x": False, "y": True})
    assert head.timeout_seconds == pytest.approx(1, abs=0.1)  # the server's own timeout comes first


def test_json_that_was_seen_before_has_its_own_binary_data() -> None:
    size = {"binary_data_size": 4}
    document = {"inputs": [{"name": "a", "shape": [4], "datatype": "UINT8", "parameters": size}]}
    for data in (b"abcd", b"efgh"):
        assert list(decoded(*binary_body(document, data))[0].raw_input_contents) == [data]


def changed(**members: Any) -> dict[str, Any]:
    """A good request with one input, of which some members are changed; None removes a member."""
    good = {"name": "query", "shape": [1, 2, 4], "datatype": "FP32", "data": [0.5] * 8}
    return {"inputs": [{key: value for key, value in {**good, **members}.items() if value is not None}]}


def with_last(element: object, datatype: str = "FP32") -> dict[str, Any]:
    """A request whose last element is another one."""
    return changed(data=[0.5] * 7 + [element], datatype=datatype)


def many(entry: object) -> Any:
    return dict.fromkeys(map(str, range(MANY)), entry)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "inputs: is required"),
        (b"{", "body: is not JSON: "),
        (b"[]", "body: must be an object"),
        (b"[" * 5000, "body: is not JSON: depth limit exceeded"),
        (b'{"inputs": [NaN]}', "body: contains NaN or infinity, which JSON cannot express; send binary"),
        (b'{"inputs": [1e999]}', "body: is not JSON: number is infinity"),
        (many(0), "body: has 257 members; the limit is 256"),
        ({"inputs": [{}] * MANY}, "inputs: List should have at most 256 items"),
        ({**changed(), "outputs": [{"name": "x"}] * MANY}, "outputs: List should have at most 256 items"),
        ({**changed(), "parameters": {"a": []}}, "parameters[a]: must be a value of the type bool or"),
        ({**changed(), "parameters": {"binary_data_output": 1}}, "parameters[binary_data_output]: must be"),
        (changed(parameters=many(1)), "inputs[0].parameters: Dictionary should have at most 256 items"),
        (changed(datatype="FP16"), "query: FP16 has no form in JSON; send it with binary_data_size"),
        (changed(shape=[1, -2, 4]), "inputs[0].shape[1]: must be greater than or equal to 0"),
        (changed(shape=[1] * 65), "inputs[0].shape: List should have at most 64 items"),
        (changed(shape=[1 << 40, 1 << 40, 4]), "query: data must be an array of "),
        (changed(data=None), "query: has none of data, binary_data_size and shared_memory_region"),
        (changed(parameters=SHARED), "query: has data and shared_memory_region of data, binary_data_size"),
        (changed(data={"a": 1}), "query: data must be an array of 8 elements; its shape is [1, 2, 4]"),
        (changed(data=[[[0.5] * 4, [0.5] * 3]]), "query: data is not nested as its shape [1, 2, 4] says"),
        (with_last("1"), "query: data contains a value of type str; FP32 takes numbers"),
        (with_last(element=True), "query: data contains a value of type bool; FP32 takes numbers"),
        (with_last(1e39), "query: data contains a number beyond the range of FP32"),
        (with_last(1, "INT64"), "query: data contains a value of type float; INT64 takes integers"),
        (with_last(1, "BOOL"), "query: data contains a value of type float; BOOL takes true and false"),
        (with_last("1", "BYTES"), "query: data contains a value of type float; BYTES takes strings"),
        (changed(datatype="INT8", data=[128] * 8), "query: data contains a number beyond the range of INT8"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:60] if isinstance(value, str) else "",
)
def test_other_json_is_refused(body: Any, error: str) -> None:
    with expect_refusal(error):
        decoded(body)


def part(size: Any, **parameters: Any) -> dict[str, Any]:
    """A request whose input is binary."""
    return changed(data=None, parameters={"binary_data_size": size, **parameters})


@pytest.mark.parametrize(
    ("document", "data", "error"),
    [
        (part(32), bytes(31), "query: has binary_data_size 32; the body has 31 bytes left for it"),
        (part(32), bytes(33), "body: has 33 bytes of binary data; the inputs use 32"),
        (part(-1), b"", "inputs[0].parameters[binary_data_size]: must be an integer, 0 or more"),
        (part(32, **SHARED), bytes(32), "query: has binary_data_size and shared_memory_region of"),
    ],
)
def test_binary_data_that_do_not_fit_are_refused(document: dict[str, Any], data: bytes, error: str) -> None:
    with expect_refusal(error):
        decoded(*binary_body(document, data))


# Name, type, shape and bytes of an output, and what the JSON says beside them.
REGION = {"shared_memory_region": "a"}
OUTPUTS: list[tuple[str, str, list[int], bytes, dict[str, Any]]] = [
    ("shared", "FP32", [], b"", {"parameters": REGION}),
    ("binary", "FP16", [2], b"abcd", {"parameters": {"binary_data_size": 4}}),
    ("text", BYTES, [2], b"\x02\0\0\0\xc3\xa4\0\0\0\0", {"data": ["ä", ""]}),
    ("flags", "BOOL", [2], b"\1\0", {"data": [True, False]}),
    ("large", "UINT64", [1], b"\xff" * 8, {"data": [2**64 - 1]}),
]


def test_a_reply_has_outputs_of_every_kind(scripted: Scripted, port: int) -> None:
    some: dict[str, Any] = {"model_name": "m", "model_version": "2", "id": "7"}
    reply = pb.ModelInferResponse(**some, parameters={"p": Choice(int64_param=2)})
    for name, datatype, shape, data, _ in OUTPUTS:
        reply.outputs.add(name=name, datatype=datatype, shape=shape)
        reply.raw_output_contents.append(data)
    reply.outputs[0].parameters["shared_memory_region"].string_param = "a"
    scripted.answer("ModelInfer", reply)
    asked = {"shared": REGION, "binary": {"binary_data": True}}
    outputs = [{"name": name, "parameters": asked.get(name, {})} for name, *_ in OUTPUTS]
    answer = ask(port, "/v2/models/m/infer", {"inputs": [], "outputs": outputs})
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    assert answer.body[size:] == b"abcd"
    expected = [
        {"name": name, "datatype": datatype, "shape": shape, **members}
        for name, datatype, shape, _, members in OUTPUTS
    ]
    assert json.loads(answer.body[:size]) == {**some, "parameters": {"p": 2}, "outputs": expected}


@pytest.mark.parametrize(
    ("datatype", "data", "error"),
    [
        ("FP32", np.array([0, np.nan], np.float32).tobytes(), "[1]: contains NaN or infinity"),
        ("FP64", np.array([-np.inf]).tobytes(), "[0]: contains NaN or infinity"),
        ("FP16", b"ab", ": FP16 has no form in JSON; request it with binary_data"),
        (BYTES, b"\1\0\0\0\xff", ": is not UTF-8; request it with binary_data"),
        (BYTES, b"\1\0\0", ": the element at byte 0 extends beyond the end of the data"),
    ],
)
def test_outputs_without_a_form_in_json(datatype: str, data: bytes, error: str) -> None:
    output = pb.ModelInferResponse.InferOutputTensor(name="x", datatype=datatype)
    reply = pb.ModelInferResponse(outputs=[output], raw_output_contents=[data])
    _, head = decoded({"inputs": []})
    with expect_refusal(f"outputs[x]{error}"):
        encode(reply.SerializeToString(), head, memory())


def finite(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    options = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    return arrays.arrays(dtype, shapes, elements=arrays.from_dtype(dtype, **options))  # type: ignore[arg-type]


@given(st.sampled_from(list(DTYPE_BY_NAME.values())).flatmap(finite))
def test_finite_numbers_survive_flat_and_nested(array: Any) -> None:
    datatype = NAME_BY_DTYPE[array.dtype]
    written = orjson.dumps(to_json("x", array.tobytes(), datatype), option=orjson.OPT_SERIALIZE_NUMPY)
    nested = array.tolist() if array.ndim else [array.tolist()]
    for data in (orjson.loads(written), nested):
        assert to_bytes("x", data, datatype, array.shape) == array.tobytes()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_survive(texts: list[str]) -> None:
    data = to_bytes("x", texts, BYTES, (len(texts),))
    assert to_json("x", data, BYTES) == texts


def size_of(value: Any) -> int:
    """What Python needs for a value and all that is in it, and for the pointer to it."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return 8 + sys.getsizeof(value) + sum(map(size_of, inner))


ENTRIES = ("0.5", "12345678901", "[]", "[0.5]", "{}", '{"a":1.5,"bcd":{"e":[1e9,2e9,"f"]}}', '"a"', "null")


@pytest.mark.parametrize("entry", [*ENTRIES, '"abcdefghijklmnopqrstuvwxyz\U0001d11e"', "[[[[[[[[0.5]]]]]]]]"])
def test_the_estimate_of_memory_is_not_too_low(entry: str) -> None:
    written = b"[" + b",".join([entry.encode()] * 1000) + b"]"
    assert size_of(orjson.loads(written)) <= memory_of(written, len(written))


CONTEXTS = "/v2/models/m/versions/2/contexts"
KEY = np.arange(12, dtype=np.float32).reshape(3, 4)
MASK = {"name": "mask", "shape": [3], "datatype": "BOOL", "data": [True, False, True]}
NAMED: dict[str, Any] = {"model_name": "m", "model_version": "2"}
CONTEXT = {
    **NAMED,
    "id": "c1",
    "rows": 2,
    "bytes": 64,
    "expires_at": 1_800_000_000,
    "shared": True,
    "documents": 0,
}


def test_rows_are_put(scripted: Scripted, port: int) -> None:
    scripted.answer("PutContext", typed.PutContextResponse(context=typed.Context(**CONTEXT)))
    parameters: dict[str, Any] = {"ttl_seconds": 60, "shared": True}
    inputs = [tensor("value", KEY[None, :, :2]), MASK, tensor("key", KEY)]
    answer = ask(port, CONTEXTS, {"parameters": parameters, "inputs": inputs})
    assert (answer.status, answer.json) == (200, CONTEXT)
    mask = typed.AttentionMask(kind=typed.AttentionMask.KIND_KEYS, bits=b"\x05")
    expected = typed.PutContextRequest(**NAMED, **parameters)
    expected.MergeFrom(typed.PutContextRequest(key=vectors(KEY), value=vectors(KEY[:, :2]), mask=mask))
    assert scripted.next().request == expected


def test_binary_rows_are_appended(scripted: Scripted, port: int) -> None:
    scripted.answer("AppendContext", typed.AppendContextResponse(context=typed.Context(**CONTEXT)))
    half = KEY.astype(np.float16)
    half_key = {"name": "key", "shape": [3, 4], "datatype": "FP16", "parameters": {"binary_data_size": 24}}
    document = {"parameters": {"append_to": "c0"}, "inputs": [half_key]}
    answer = ask(port, CONTEXTS, *binary_body(document, half.tobytes()))
    assert (answer.status, answer.json) == (200, CONTEXT)
    assert scripted.next().request == typed.AppendContextRequest(**NAMED, id="c0", key=vectors(half))


def test_contexts_are_listed_and_dropped(scripted: Scripted, port: int) -> None:
    listed: dict[str, Any] = {"contexts": [CONTEXT], "next_page_token": "7"}
    scripted.answer("ListContexts", typed.ListContextsResponse(**listed))
    page = ask(port, f"{CONTEXTS}?page_size=1&page_token=9&name=ignored")
    assert page.json == listed
    asked: dict[str, Any] = {"page_size": 1, "page_token": "9"}
    assert scripted.next().request == typed.ListContextsRequest(**NAMED, **asked)
    assert ask(port, f"{CONTEXTS}?page_size=many").status == 400
    answer = ask(port, f"{CONTEXTS}/c1", method="DELETE")
    assert (answer.status, answer.body, "content-length" in answer.headers) == (204, b"", False)
    assert scripted.next().request == typed.DropContextRequest(**NAMED, id="c1")
