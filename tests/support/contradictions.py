"""Requests whose shapes, counts and encodings contradict each other: good ones, changed field by field."""

import gzip
import json
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.samples import CROSS, SELF, TEXT
from tests.support.mutations import ATTEND, DATATYPES, EDGES, INFER, MAX_MUTATIONS, Good, good_requests

# Larger bodies are tested one by one, by tests/chaos/test_hostile_messages.py.
MAX_BYTES = 64 << 10
TYPES: dict[str, type[Message]] = {ATTEND: typed.AttendRequest, INFER: pb.ModelInferRequest}
WORDS = (
    *DATATYPES,
    *(SELF, CROSS, TEXT, "sentence", ""),
    *("query", "key", "value", "token_ids", "text", "positions", "attention_mask", "key_lengths"),
    *("context_vectors", "attention_weights", "embedding", "lengths", "tokens"),
    *("shared_memory_region", "shared_memory_byte_size", "binary_data", "binary_data_size", "dimensions"),
)
# What is made of a good request.
Made = Good
HOLLOW_SHARE = 0.1
COUNTS = (2, 3, 64, 4097, 20_000)
NUMBERS = (*EDGES, -1, -(2**31), -(2**63))
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def contradicted(good: Good, rng: random.Random) -> bytes:
    """A message with up to four changes; the good one if it became too large."""
    message = TYPES[good.method].FromString(good.data)
    if isinstance(message, pb.ModelInferRequest) and rng.random() < HOLLOW_SHARE:
        tensor = rng.choice(message.inputs)
        tensor.shape[:] = _hollow(rng)
        tensor.ClearField("contents")
        message.raw_input_contents[:] = [b""] * len(message.raw_input_contents)
    for _ in range(rng.randint(0, MAX_MUTATIONS)):
        _change_message(message, rng)
    data = message.SerializeToString()
    return data if len(data) <= MAX_BYTES else good.data


def _hollow(rng: random.Random) -> list[int]:
    """A shape of any size that has no elements."""
    shape = [rng.choice([number for number in EDGES if number < 2**63]) for _ in range(rng.randint(0, 3))]
    shape.insert(rng.randrange(len(shape) + 1), 0)
    return shape


def _change_message(message: Message, rng: random.Random) -> None:
    """Changes one field, which is set or not, of a message or of one inside it."""
    # A message to another model is refused before the rest of it is read.
    present = [field for field, _ in message.ListFields() if field.name != "model_name"]
    field = rng.choice(present if present and rng.random() < 0.9 else message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_message(getattr(message, field.name)[rng.choice(WORDS)], rng)
    elif field.is_repeated:
        _change_repeated(getattr(message, field.name), field, rng)
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), rng))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        _change_message(getattr(message, field.name), rng)


def _change_repeated(values: Any, field: FieldDescriptor, rng: random.Random) -> None:
    is_message = field.message_type is not None
    if not values:
        empty = {field.TYPE_BYTES: b"", field.TYPE_STRING: ""}.get(field.type, 0)
        values.add() if is_message else values.append(_scalar(field, empty, rng))
        return
    at = rng.randrange(len(values))
    match rng.randrange(4):
        case 0:
            del values[at]
        case 1:
            # What is repeated often is small: numbers, and names.
            size = len(values[at]) if isinstance(values[at], bytes | str) else 1
            count = 2 if is_message else min(rng.choice(COUNTS), MAX_BYTES // (1 + size))
            values.extend([values[at]] * count)
        case _ if is_message:
            _change_message(values[at], rng)
        case _:
            values[at] = _scalar(field, values[at], rng)


def _scalar(field: FieldDescriptor, value: Any, rng: random.Random) -> Any:
    if field.cpp_type in INTEGERS:
        least, most = INTEGERS[field.cpp_type]
        return rng.choice([number for number in NUMBERS if least <= number <= most])
    if isinstance(value, bytes):
        return _content(value, rng)
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, bool) or field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    return rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))


def _content(content: bytes, rng: random.Random) -> bytes:
    """Elements of a tensor: fewer, more, none, or of bytes that its type does not have."""
    return rng.choice(
        (
            b"",
            content[: rng.randrange(len(content) + 1)],
            content + content[:8],
            bytes([rng.choice((0, 1, 2, 255))]) * len(content),
        )
    )


class Body(NamedTuple):
    """The body of a request over HTTP.

    Attributes:
        path: Where it is posted.
        document: Its JSON.
        binary: The binary tensors after the JSON; None if it has none.
    """

    path: str
    document: dict[str, Any]
    binary: bytes | None = None

    def sent(self) -> Good:
        """As a good client sends it."""
        data = json.dumps(self.document).encode()
        if self.binary is None:
            return Good(self.path, data, {})
        return Good(self.path, data + self.binary, {"Inference-Header-Content-Length": str(len(data))})


def good_bodies() -> list[Body]:
    """One body of each form that HTTP takes."""
    rows = np.linspace(-1, 1, 24, dtype=np.float32)
    query = {"name": "query", "shape": [2, 3, 4], "datatype": "FP32"}
    mask = {"name": "attention_mask", "shape": [2, 3], "datatype": "BOOL"}
    lengths = {"name": "key_lengths", "shape": [2], "datatype": "INT64", "data": [3, 2]}
    text = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["Life is", "short"]}
    infer, nested = f"/v2/models/{SELF}/infer", rows.reshape(2, 3, 4).tolist()
    sizes = {"binary_data_size": rows.nbytes}, {"binary_data_size": 6}
    return [
        Body(
            infer,
            {
                "id": "7",
                "inputs": [{**query, "data": nested}, lengths],
                "outputs": [{"name": "context_vectors"}],
            },
        ),
        Body(infer, {"inputs": [{**query, "data": rows.tolist()}, {**mask, "data": [True, False] * 3}]}),
        Body(
            infer,
            {
                "inputs": [{**query, "parameters": sizes[0]}, {**mask, "parameters": sizes[1]}],
                "parameters": {"binary_data_output": True},
            },
            rows.tobytes() + b"\1\0\1\1\1\0",
        ),
        Body(f"/v2/models/{TEXT}/infer", {"inputs": [text], "parameters": {"timeout": 30_000_000}}),
        Body("/v1/embeddings", {"model": "sentence", "input": ["Life is", "short"], "dimensions": 8}),
        Body("/v1/embeddings", {"model": "sentence", "input": [[1, 2, 3], [4]], "encoding_format": "float"}),
    ]


def contradicted_body(good: Body, rng: random.Random) -> Made:
    """A body with changes of its JSON, of its binary tensors, or of how it is encoded."""
    document, binary = json.loads(json.dumps(good.document)), good.binary
    if "inputs" in document and rng.random() < HOLLOW_SHARE:
        rng.choice(document["inputs"]).update(shape=_hollow(rng), data=[])
    for _ in range(rng.randint(0, MAX_MUTATIONS)):
        document = _changed(document, rng)
    if binary is not None and rng.random() < 0.5:
        binary = _content(binary, rng)
    sent = Body(good.path, document, binary).sent()
    sent = good.sent() if len(sent.data) > MAX_BYTES else sent
    return rng.choice((lambda sent, _: sent, _compressed, _another_header, _cut))(sent, rng)


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one change."""
    if not (isinstance(value, dict | list) and value and rng.random() < 0.9):
        return rng.choice((*NUMBERS, *WORDS, 2**70, 0.5, 1e308, True, None, [], {}, [[]], [0] * 1000, ""))
    if isinstance(value, dict):
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {own: each for own, each in value.items() if own != name}
        return {**value, rng.choice(WORDS) if rng.random() < 0.1 else name: _changed(value[name], rng)}
    at = rng.randrange(len(value))
    many = min(rng.choice(COUNTS), MAX_BYTES // (2 + len(json.dumps(value[at]))))
    changed = [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    return rng.choice((value[:at] + value[at + 1 :], value + [value[at]] * many, [value], changed, changed))


def _compressed(sent: Made, rng: random.Random) -> Made:
    """Compressed, perhaps in another way than its header says, and perhaps cut."""
    data = rng.choice((gzip.compress, zlib.compress))(sent.data)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data))]
    headers = {**(sent.headers or {}), "Content-Encoding": rng.choice(("gzip", "deflate"))}
    return sent._replace(data=data, headers=headers)


def _another_header(sent: Made, rng: random.Random) -> Made:
    length = str(rng.choice((*NUMBERS, len(sent.data), len(sent.data) + 1, "x", "1e3", "0x10")))
    header = rng.choice(
        (
            {"Inference-Header-Content-Length": length},
            {"Content-Encoding": rng.choice(("br", "identity", "gzip, gzip"))},
            {"Content-Type": rng.choice(("text/plain", "application/octet-stream", ""))},
        )
    )
    return sent._replace(headers={**(sent.headers or {}), **header})


def _cut(sent: Made, rng: random.Random) -> Made:
    return sent._replace(data=sent.data[: rng.randrange(len(sent.data) + 1)])


def good_and_contradicted() -> list[tuple[Made, Callable[[random.Random], Made]]]:
    """Each good request of both protocols and of HTTP, and what makes contradictory ones of it."""

    def of_message(good: Good) -> Callable[[random.Random], Made]:
        return lambda rng: Made(good.method, contradicted(good, rng))

    calls = [(good, of_message(good)) for good in good_requests()]
    return calls + [(good.sent(), partial(contradicted_body, good)) for good in good_bodies()]
