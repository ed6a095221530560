"""Calls that both clients make, as Python values and as the JSON that the TypeScript tests read."""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attention_client import (
    AttentionClient,
    AttentionClientError,
    AttentionResult,
    InferResult,
    ModelInfo,
)

from tests.clients.named_module import CAPTION, inputs
from tests.server.samples import CROSS, HEADS, SELF, TEXT

_RANDOM = np.random.default_rng(7)
# Names of the sizes of an array in TypeScript.
VECTORS, WEIGHTS = ("rows", "width"), ("heads", "queryRows", "keyRows")


def vectors(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Standard normal vectors."""
    return _RANDOM.standard_normal(shape, dtype=np.float32)


def mask(*shape: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A random mask; some query rows may attend to nothing."""
    return _RANDOM.random(shape) < 0.6


@dataclass(frozen=True)
class Case:
    """One call of a client.

    Attributes:
        method: The method's name in Python.
        model: Name of the model.
        given: The query, the text, the token ids, or inputs by name.
        options: The other arguments, by their names in Python.
    """

    method: str
    model: str
    given: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def call(self, client: AttentionClient) -> AttentionResult[Any] | InferResult:
        """Makes the call."""
        result: AttentionResult[Any] | InferResult = getattr(client, self.method)(
            self.model, self.given, **self.options
        )
        return result

    def to_json(self, client: AttentionClient) -> dict[str, Any]:
        """The call and its outcome: a result or an error."""
        given, options = self.given, dict(self.options)
        if isinstance(given, np.ndarray) and given.ndim == BATCH_RANK:  # TypeScript has lists only
            given = list(given)
            options |= {name: list(own) for name, own in options.items() if isinstance(own, np.ndarray)}
        call = {
            "method": _camel(self.method),
            "model": self.model,
            "given": _named(given) if self.method == "infer" else _value(given),
            "options": {_camel(name): _value(value) for name, value in options.items()},
        }
        try:
            return call | {"result": _result(self.call(client))}
        except AttentionClientError as error:
            code = error.code.name if error.code else ""
            details = {"code": code, "reason": error.reason, "field": error.field, "message": error.message}
            return call | {"error": details}


BATCH_RANK = 3
LISTS = {
    name: [inputs(rows, words, seed=rows)[name] for rows, words in ((3, 5), (1, 2), (6, 5))]
    for name in inputs(1, 1)
}
QUERY, RAGGED, BATCH = vectors(5, 4), [vectors(rows, 4) for rows in (3, 1, 7)], vectors(3, 6, 4)
OTHERS = {"key": vectors(2, 5, 6), "value": vectors(2, 5, 5), "lengths": [2, 5], "return_weights": True}
CASES = {
    "one": Case("attend", SELF, QUERY),
    "ragged": Case("attend", SELF, RAGGED, {"return_weights": True}),
    "lengths": Case("attend", SELF, BATCH, {"lengths": [6, 1, 3], "return_weights": True}),
    "mask-heads": Case("attend", SELF, QUERY, {"mask": mask(HEADS, 5, 5), "return_weights": True}),
    "mask-lengths": Case("attend", SELF, BATCH, {"mask": mask(3, HEADS, 6, 6), "lengths": [2, 6, 5]}),
    "cross-lengths": Case("attend", CROSS, vectors(2, 3, 4), OTHERS | {"mask": mask(2, 3, 5)}),
    "text": Case("attend_text", TEXT, "eat dessert first", {"return_weights": True}),
    "texts": Case("attend_text", TEXT, ["Life is short", "eat dessert"], {"mask": [mask(3), mask(2)]}),
    "tokens-ragged": Case("attend_tokens", TEXT, [np.array([2]), np.array([0, 1, 4])]),
    "infer-batch": Case("infer", CAPTION, inputs(3, 5, 2), {"version": 1}),
    "infer-ragged": Case("infer", CAPTION, LISTS),
    "infer-outputs": Case("infer", CAPTION, LISTS, {"outputs": ["kept", "count"]}),
    "error-input": Case("infer", CAPTION, inputs(3, 5) | {"y": vectors(3)}),
    "error-type": Case("infer", CAPTION, inputs(3, 5) | {"x": np.ones((3, 4), np.int64)}),
    "error-model": Case("attend", "absent", QUERY),
    "error-width": Case("attend", SELF, vectors(2, 3)),
}


def model_json(model: ModelInfo) -> dict[str, Any]:
    """A model's description with TypeScript's names."""
    described: dict[str, Any] = _renamed(dataclasses.asdict(model))
    return described


def _renamed(value: Any) -> Any:
    """Names in camel case, but not those of a model's axes; without what is None or TypeScript lacks."""
    if isinstance(value, dict):
        return {
            _camel(name): item if name == "max_lengths" else _renamed(item)
            for name, item in value.items()
            if item is not None and name != "text_encoder"
        }
    if isinstance(value, list | tuple):
        return [_renamed(item) for item in value]
    return "string" if value == "str" else value


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "i":
        return value.tolist()
    return _sized(value, WEIGHTS[-value.ndim :] if value.dtype.kind == "b" else VECTORS)


def _named(tensors: Mapping[str, Any]) -> dict[str, Any]:
    def tensor(array: Any) -> dict[str, Any]:
        return {"data": _data(array), "shape": list(array.shape)}

    return {
        name: list(map(tensor, own)) if isinstance(own, list) else tensor(own)
        for name, own in tensors.items()
    }


def _sized(array: Any, names: Sequence[str]) -> dict[str, Any]:
    return {"data": _data(array), **dict(zip(names, array.shape, strict=True))}


def _data(array: Any) -> Any:
    if array.dtype.kind == "b":
        return array.ravel().tolist()
    name, dtype = ("int64", "<i8") if array.dtype.kind == "i" else ("float32", "<f4")
    return {name: base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()}


def _result(result: AttentionResult[Any] | InferResult) -> dict[str, Any]:
    found: dict[str, Any] = {"modelName": result.model_name, "modelVersion": result.model_version}
    if isinstance(result, InferResult):
        return found | {"outputs": _named(result.outputs)}
    found["contextVectors"] = _each(result.context_vectors, VECTORS)
    if result.attention_weights is not None:
        found["attentionWeights"] = _each(result.attention_weights, WEIGHTS)
    return found


def _each(arrays: Any, names: Sequence[str]) -> Any:
    one = isinstance(arrays, np.ndarray) and arrays.ndim == len(names)
    return _sized(arrays, names) if one else [_sized(array, names) for array in arrays]
