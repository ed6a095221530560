"""The cache of requests: hits are answered as if the requests had been decoded."""

import dataclasses
import math
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from google.protobuf.message import Message

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import inference
from attention_serving.server.api.attention.handlers import Attend, AttendStream
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.inference import InferenceMethod, RequestCache, _is_cacheable
from attention_serving.server.api.open_inference.handlers import ModelInfer, ModelStreamInfer
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotFoundError
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from tests.server.api.messages import decode_infer, raw_request, rectangles, text_request, vectors
from tests.server.api.scripted import ScriptedCall
from tests.server.samples import CROSS, SELF, TEXT, WIDTHS
from tests.server.seams import SAME_FOR_ALL, costing
from tests.support.coroutines import reserve, run
from tests.support.mutations import Good, mutated, named

rng = np.random.default_rng(0)
Models = dict[str, LoadedModel]
CALL = ScriptedCall(math.inf)


class Method(NamedTuple):
    """A method of a service, without a transport."""

    method: InferenceMethod

    @property
    def cache(self) -> RequestCache:
        return self.method._cache

    def answer(self, data: bytes) -> bytes:
        """Handles a request."""
        return run(self.method.handle(data, CALL, reserve(MemoryBudget(64 * MIB), len(data))))

    def hits(self, data: bytes) -> bool:
        """Whether the cache has the request."""
        return self.cache.get(data, CALL) is not None

    def decoded(self, data: bytes) -> bytes:
        """The answer to a message that is parsed and decoded, whether or not the cache has it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.cache, "get", lambda *_: None)
            return self.answer(data)

    def cached(self, data: bytes) -> bytes:
        """The answer to a message that the cache has, which is not decoded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.cache, "put", Mock(side_effect=AssertionError("the request was decoded")))
            return self.answer(data)


Methods = dict[type[InferenceMethod], Method]


@pytest.fixture
def methods(engine: Engine, threads: CodecThreads) -> Methods:
    """The methods of one engine, by their classes."""
    return {
        **{kind: Method(kind(engine, threads, SharedMemory())) for kind in (ModelInfer, ModelStreamInfer)},
        **{kind: Method(kind(engine, threads)) for kind in (Attend, AttendStream)},
    }


def infer_request(model: LoadedModel, batch: int = 1, *, name: str = "7") -> pb.ModelInferRequest:
    message = raw_request(model, rectangles(model, batch, 3, 3))
    message.id = name
    return message


def rows(width: int, *lengths: int) -> typed.VectorSequences:
    return vectors(*(rng.standard_normal((length, width), np.float32) for length in lengths))


def self_request(*lengths: int, **options: Any) -> typed.AttendRequest:
    return typed.AttendRequest(model_name=SELF, query=rows(4, *lengths), **options)


def cross_request(*lengths: int, **options: Any) -> typed.AttendRequest:
    sent: dict[str, Any] = {name: rows(width, *lengths) for name, width in WIDTHS.items()}
    return typed.AttendRequest(model_name=CROSS, model_version="1", **sent, **options)


def named_request(*lengths: int) -> typed.AttendRequest:
    """Inputs by name, in another order than the model's."""
    inputs = [
        named(name, *(rng.standard_normal((length, width), np.float32) for length in lengths))
        for name, width in reversed(WIDTHS.items())
    ]
    return typed.AttendRequest(model_name=CROSS, inputs=inputs)


def streamed(request: typed.AttendRequest, name: str) -> typed.AttendStreamRequest:
    return typed.AttendStreamRequest(id=name, request=request)


def as_numbers(models: Models, _: str) -> pb.ModelInferRequest:
    message = infer_request(models[SELF])
    message.inputs[0].contents.fp32_contents.extend(np.frombuffer(message.raw_input_contents.pop(), "<f4"))
    return message


def asserted_alike(method: Method, make: Callable[[str], Message]) -> None:
    """Requests that differ in vectors and id from the first are cache hits, answered as if they were not.

    The third is answered with what is known of the reply to the second.
    """
    first, second, third = (make(f"request {at}").SerializeToString() for at in range(3))
    assert not method.hits(second)
    method.decoded(first)
    cached = [method.cached(data) for data in (second, third)]
    # To decode a request caches it anew, without what is known of replies.
    assert cached == [method.decoded(data) for data in (second, third)]
    assert len({first, second, third}) == 3


Alike = tuple[type[InferenceMethod], Callable[[Models, str], Message]]
ALIKE: dict[str, Alike] = {
    "raw": (ModelInfer, lambda models, name: infer_request(models[CROSS], 3, name=name)),
    "numbers": (ModelInfer, as_numbers),
    "stream of raw": (ModelStreamInfer, lambda models, name: infer_request(models[CROSS], name=name)),
    "ragged, weights": (Attend, lambda *_: self_request(3, 1, 2, return_weights=True)),
    "FP16 out": (Attend, lambda *_: self_request(3, output_data_type=typed.DATA_TYPE_FP16)),
    "cross, large": (Attend, lambda *_: cross_request(1500, 2)),
    "named": (Attend, lambda *_: named_request(3, 2)),
    "stream, named": (AttendStream, lambda _, name: streamed(named_request(2), name)),
}


@pytest.mark.parametrize("row", ALIKE.values(), ids=ALIKE)
def test_requests_that_differ_in_vectors_and_id(methods: Methods, models: Models, row: Alike) -> None:
    kind, make = row
    asserted_alike(methods[kind], partial(make, models))


def test_a_cached_request_whose_run_was_padded(models: Models, threads: CodecThreads) -> None:
    """Its outputs are views of padded ones, with gaps between their rows."""
    engine = Engine(Repository([costing(models[CROSS], SAME_FOR_ALL)]))
    asserted_alike(Method(Attend(engine, threads)), lambda _: cross_request(2, 3, return_weights=True))
    engine.close()


def with_lengths(models: Models) -> pb.ModelInferRequest:
    tensors = {"query": np.ones((2, 3, 4), np.float32), "key_lengths": np.array([3, 2])}
    return raw_request(models[SELF], tensors)


def with_timeout(models: Models) -> pb.ModelInferRequest:
    message = infer_request(models[SELF])
    message.parameters["timeout"].int64_param = 60_000_000
    return message


HALF = vectors(np.zeros((1, 4), np.float16))
MASK = typed.AttentionMask(kind=typed.AttentionMask.KIND_KEYS, bits=b"\x07")
# What vectors, texts, the time or other copies decide; what is rare; and what is too long.
NotCached = tuple[type[InferenceMethod], Callable[[Models], Message]]
NOT_CACHED: dict[str, NotCached] = {
    "key lengths": (ModelInfer, with_lengths),
    "timeout": (ModelInfer, with_timeout),
    "FP16": (Attend, lambda _: typed.AttendRequest(model_name=SELF, query=HALF)),
    "tokens": (ModelInfer, lambda models: raw_request(models[TEXT], {"token_ids": np.array([[0, 1, 2]])})),
    "texts": (ModelInfer, lambda models: text_request(models[TEXT], [b"Life is short"])),
    "mask": (Attend, lambda _: self_request(3, mask=MASK)),
    "many sequences": (Attend, lambda _: self_request(*[1] * 9)),
}


@pytest.mark.parametrize("row", NOT_CACHED.values(), ids=NOT_CACHED)
def test_other_requests_are_not_kept(methods: Methods, models: Models, row: NotCached) -> None:
    own, data = methods[row[0]], row[1](models).SerializeToString()
    assert own.answer(data) == own.answer(data)
    assert not own.hits(data)


def test_a_request_with_booleans_is_not_kept(self_model: LoadedModel) -> None:
    """Only its content shows whether it is valid: booleans are 0 or 1."""
    (spec,) = self_model.inputs
    graphs = {
        kind: graph.model_copy(update={"inputs": (spec.model_copy(update={"data_type": "bool"}),)})
        for kind, graph in self_model.manifest.graphs.items()
    }
    manifest = self_model.manifest.model_copy(update={"graphs": graphs})
    decoded, _ = decode_infer(infer_request(self_model), self_model)
    assert _is_cacheable(decoded, self_model)
    assert not _is_cacheable(decoded, dataclasses.replace(self_model, manifest=manifest))


def test_the_least_recently_used_is_dropped(methods: Methods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "CACHED_SIZES", 3)
    attend = methods[Attend]
    data = [self_request(rows).SerializeToString() for rows in range(1, 6)]
    for one in data:
        attend.decoded(one)
        attend.cached(data[0])
    assert [attend.hits(one) for one in data] == [True, False, False, True, True]


def test_a_model_that_was_replaced_is_not_used_and_freed(models: Models, threads: CodecThreads) -> None:
    replaced = dataclasses.replace(models[SELF])
    freed = weakref.ref(replaced)
    repository = Repository([replaced])
    engine = Engine(repository)
    infer = Method(ModelInfer(engine, threads, SharedMemory()))
    data = infer_request(models[SELF]).SerializeToString()
    infer.decoded(data)
    assert infer.hits(data)
    repository.replace(SELF, {})
    with pytest.raises(ModelNotFoundError):
        infer.answer(data)
    assert freed() is not None  # a request may still use it
    del replaced
    repository.replace(SELF, {"1": models[SELF]})
    assert not infer.hits(data)
    infer.decoded(data)
    assert infer.cached(data)
    engine.close()
    assert freed() is None


@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "stream"])
def test_a_changed_message_is_read_again(methods: Methods, models: Models, *, is_streamed: bool) -> None:
    """A message that passes for a known one is answered as its own fields demand."""
    request = streamed(cross_request(2, 1), "some id") if is_streamed else infer_request(models[CROSS], 2)
    method, message = methods[AttendStream if is_streamed else ModelInfer], request.SerializeToString()
    method.decoded(message)
    found, changes = 0, random.Random(7)  # noqa: S311 - the same every time
    for _ in range(1000):
        if changes.random() < 0.5:
            data = bytearray(message)
            data[changes.randrange(len(data))] ^= 1 << changes.randrange(8)
            changed = bytes(data)
        else:
            changed = mutated(Good("", message), changes)
        if method.hits(changed):
            found += 1
            assert method.cached(changed) == method.decoded(changed)
    assert found > 30
