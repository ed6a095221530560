"""Requests whose shapes, counts and encodings contradict each other: good ones, changed field by field.

Messages of gRPC are changed in their form as JSON, as the bodies of HTTP are.
"""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from tests.server.http.scripted import METHODS
from tests.server.samples import CROSS, SELF, TEXT
from tests.support.mutations import EDGES, MAX_MUTATIONS, Good, good_requests, mutated

# Larger bodies are tested one by one, by tests/chaos/test_hostile_messages.py.
MAX_BYTES = 64 << 10
TYPES: dict[str, type[Message]] = {method: request for method, (request, _) in METHODS.items()}
WORDS = (
    *("FP32", "FP16", "INT64", "INT32", "BOOL", "BYTES", "UINT8", "BF16", "FP64"),
    *(SELF, CROSS, TEXT, "sentence", "", "NaN", "Infinity"),
    *(field.name for kind in TYPES.values() for field in kind.DESCRIPTOR.fields),
    *("positions", "attention_mask", "key_lengths", "context_vectors", "attention_weights", "embedding"),
    *("lengths", "tokens", "shared_memory_region", "shared_memory_byte_size"),
    *("binary_data", "binary_data_size", "dimensions"),
)
# What is made of a good request.
Made = Good
COUNTS = (2, 3, 64, 4097, 20_000)
NUMBERS = (*EDGES, -1, -(2**31), -(2**63), 0.5, 1e38)
ANYTHING = (*NUMBERS, *WORDS, 2**70, 1e308, True, None, [], {}, [[]], [0] * 1000)
# A request to another model is refused before the rest of it is read.
KEPT = ("model_name", "model")


def contradicted(good: Good, rng: random.Random) -> bytes:
    """A message with up to four changes; the good one if it became too large."""
    kind = TYPES[good.method]

    def parse(document: Any) -> Message:
        return ParseDict(document, kind(), ignore_unknown_fields=True)

    message, is_empty = kind.FromString(good.data), not good.data
    document = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=is_empty
    )
    data = parse(_with_changes(document, rng, parse)).SerializeToString()
    return data if len(data) <= MAX_BYTES else good.data


def contradicted_call(good: Good, rng: random.Random) -> Made:
    """A message with changes of its fields or of its bytes."""
    return Made(good.method, rng.choice((mutated, contradicted))(good, rng))


def contradicted_body(good: "Body", rng: random.Random) -> Made:
    """A body with changes of its JSON, of the stated length of it, or of its bytes."""
    sent = Body(good.path, _with_changes(good.document, rng, json.dumps), good.binary).sent()
    sent = good.sent() if len(sent.data) > MAX_BYTES else sent
    if rng.random() < 0.5:
        return sent
    length = str(rng.choice((*NUMBERS, len(sent.data), len(sent.data) + 1, "x", "1e3", "0x10")))
    headers = {**(sent.headers or {}), "Inference-Header-Content-Length": length}
    return rng.choice((sent._replace(headers=headers), sent._replace(data=mutated(sent, rng))))


def _with_changes(document: Any, rng: random.Random, parse: Callable[[Any], object]) -> Any:
    """A document with those of up to four changes that can be parsed."""
    for _ in range(rng.randint(0, MAX_MUTATIONS)):
        changed = _changed(document, rng)
        with suppress(ParseError, TypeError):
            parse(changed)
            document = changed
    return document


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one change."""
    if not isinstance(value, dict | list):
        return _another_scalar(value, rng)
    if not value or rng.random() < 0.1:
        return rng.choice(ANYTHING)
    if isinstance(value, dict):
        name = rng.choice([name for name in value if name not in KEPT] or list(value))
        if rng.random() < 0.1:
            return {own: each for own, each in value.items() if own != name}
        return {**value, rng.choice(WORDS) if rng.random() < 0.2 else name: _changed(value[name], rng)}
    at = rng.randrange(len(value))
    many = min(rng.choice(COUNTS), MAX_BYTES // (2 + len(json.dumps(value[at]))))
    changed = [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    return rng.choice((value[:at] + value[at + 1 :], value + [value[at]] * many, [value], changed, changed))


def _another_scalar(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, or of any. Texts may be elements of a tensor in base64."""
    if rng.random() < 0.1:
        return rng.choice(ANYTHING)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        cut = value[: rng.randrange(len(value) + 1)]
        number = rng.choice(NUMBERS)  # of 64 bits, which protobuf writes as texts
        return rng.choice((rng.choice(WORDS), number, cut, value + value[:8], value[:1] * len(value)))
    return rng.choice(NUMBERS)


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
    inputs = [{**query, "data": nested}, {**mask, "data": [True, False] * 3}, lengths]
    sizes = ({"binary_data_size": rows.nbytes}, {"binary_data_size": 6})
    binary = [{**each, "parameters": size} for each, size in zip((query, mask), sizes, strict=True)]
    return [
        Body(infer, {"id": "7", "inputs": inputs, "outputs": [{"name": "context_vectors"}]}),
        Body(
            infer,
            {"inputs": binary, "parameters": {"binary_data_output": True}},
            rows.tobytes() + b"\1\0\1\1\1\0",
        ),
        Body(f"/v2/models/{TEXT}/infer", {"inputs": [text], "parameters": {"timeout": 30_000_000}}),
        Body("/v1/embeddings", {"model": "sentence", "input": ["Life is", "short"], "dimensions": 8}),
        Body("/v1/embeddings", {"model": "sentence", "input": [[1, 2, 3], [4]], "encoding_format": "float"}),
    ]


def good_and_changed() -> list[tuple[Made, Callable[[random.Random], Made]]]:
    """Each good request of both protocols and of HTTP, and what makes others of it."""

    calls: list[tuple[Made, Callable[[random.Random], Made]]]
    calls = [(good, partial(contradicted_call, good)) for good in good_requests()]
    return calls + [(good.sent(), partial(contradicted_body, good)) for good in good_bodies()]
