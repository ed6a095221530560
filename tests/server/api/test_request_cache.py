"""Requests that are recognised by the bytes around their vectors: they are answered as if they were not."""

import dataclasses
import math
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf.message import Message

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import inference
from attention_serving.server.api.attention.service import Attend, AttendStream
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.inference import MAX_ALIKE, Inference, RequestCache, _depends_on_form
from attention_serving.server.api.method import LARGE_BYTES
from attention_serving.server.api.open_inference.service import ModelInfer, ModelStreamInfer
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotFoundError
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Array
from tests.server.api.messages import decode_infer, raw_request, text_request
from tests.server.api.scripted import ScriptedCall
from tests.server.samples import CROSS, SELF, TEXT, WIDTHS
from tests.server.seams import SAME_FOR_ALL, costing
from tests.support.coroutines import run
from tests.support.mutations import Good, mutated, named

rng = np.random.default_rng(0)


CALL = ScriptedCall(math.inf)


class Method(NamedTuple):
    """A method of a service, without a transport."""

    method: Inference

    @property
    def cache(self) -> RequestCache:
        return self.method._cache

    def answer(self, data: bytes) -> bytes:
        """Handles a request."""
        return run(self.method.handle(data, CALL, MemoryBudget(64 * MIB).reserve(len(data))))

    def hits(self, data: bytes) -> bool:
        """Whether the cache has the request."""
        return self.cache.get(data, CALL) is not None

    def decoded(self, data: bytes) -> bytes:
        """The answer to a message that is parsed and decoded, whether or not the cache has it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.cache, "get", lambda *_: None)
            return self.answer(data)

    def recognised(self, data: bytes) -> bytes:
        """The answer to a message that the cache has, which is not decoded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.cache, "keep", _not_decoded)
            return self.answer(data)


def _not_decoded(*_: object) -> None:
    raise AssertionError("the request was decoded")


class Methods(NamedTuple):
    """The methods of one engine."""

    infer: Method
    stream_infer: Method
    attend: Method
    attend_stream: Method


@pytest.fixture
def methods(loaded: Repository, threads: CodecThreads) -> Iterator[Methods]:
    engine = Engine(loaded)
    kinds: tuple[Callable[..., Inference], ...] = (ModelInfer, ModelStreamInfer, Attend, AttendStream)
    yield Methods(*(Method(kind(engine, threads)) for kind in kinds))
    engine.close()


@pytest.fixture
def infer(methods: Methods) -> Method:
    return methods.infer


@pytest.fixture
def attend(methods: Methods) -> Method:
    return methods.attend


def infer_request(model: LoadedModel, batch: int = 1, rows: int = 3, *outputs: str) -> pb.ModelInferRequest:
    tensors: dict[str, Array] = {
        spec.name: rng.standard_normal((batch, rows, WIDTHS[spec.name]), np.float32) for spec in model.inputs
    }
    return raw_request(model, tensors, outputs)


def vectors(width: int, *lengths: int) -> typed.VectorSequences:
    data = rng.standard_normal((sum(lengths), width), np.float32).tobytes()
    return typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=width, lengths=lengths, data=data)


def self_request(*lengths: int, **options: Any) -> typed.AttendRequest:
    return typed.AttendRequest(model_name=SELF, query=vectors(4, *lengths), **options)


def cross_request(*lengths: int) -> typed.AttendRequest:
    return typed.AttendRequest(
        model_name=CROSS,
        model_version="1",
        query=vectors(WIDTHS["query"], *lengths),
        key=vectors(WIDTHS["key"], *lengths),
        value=vectors(WIDTHS["value"], *lengths),
    )


def asserted_alike(method: Method, make: Callable[[int], Message]) -> None:
    """Requests that differ in vectors and id from the first are recognised, and answered as if they were not.

    The third is answered with what is known of the reply to the second.
    """
    first, second, third = (make(at).SerializeToString() for at in range(3))
    assert not method.hits(second)
    method.decoded(first)

    recognised = [method.recognised(data) for data in (second, third)]
    # To decode a request keeps it anew, without what is known of replies.
    assert recognised == [method.decoded(data) for data in (second, third)]
    assert len({first, second, third}) == 3


def named_request(*lengths: int) -> typed.AttendRequest:
    """Inputs by name, in another order than the model's."""
    inputs = [
        named(name, *(rng.standard_normal((length, width), np.float32) for length in lengths))
        for name, width in reversed(WIDTHS.items())
    ]
    return typed.AttendRequest(model_name=CROSS, inputs=inputs)


def raw(models: dict[str, LoadedModel], at: int) -> pb.ModelInferRequest:
    message = infer_request(models[CROSS], 3)
    message.id = f"request {at}"
    return message


def reversed_with_weights(models: dict[str, LoadedModel], _: int) -> pb.ModelInferRequest:
    message = infer_request(models[CROSS], 2, 3, "attention_weights")
    message.inputs.reverse()
    message.raw_input_contents.reverse()
    return message


def as_numbers(models: dict[str, LoadedModel], _: int) -> pb.ModelInferRequest:
    message = infer_request(models[SELF])
    message.inputs[0].contents.fp32_contents.extend(np.frombuffer(message.raw_input_contents.pop(), "<f4"))
    return message


def of_tritons_client(models: dict[str, LoadedModel], at: int) -> pb.ModelInferRequest:
    message = raw(models, at)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def streamed(request: typed.AttendRequest, name: str = "") -> typed.AttendStreamRequest:
    return typed.AttendStreamRequest(id=name, request=request)


ALIKE: dict[str, tuple[str, Callable[[dict[str, LoadedModel], int], Message]]] = {
    "raw": ("infer", raw),
    "raw, reversed, weights": ("infer", reversed_with_weights),
    "numbers": ("infer", as_numbers),
    "raw, large": ("infer", lambda models, _: infer_request(models[SELF], 4, 3000)),
    "stream of Triton's client": ("stream_infer", of_tritons_client),
    "ragged, weights": ("attend", lambda *_: self_request(3, 1, 2, return_weights=True)),
    "FP16 out": ("attend", lambda *_: self_request(3, output_data_type=typed.DATA_TYPE_FP16)),
    "cross, large": ("attend", lambda *_: cross_request(1500, 2)),
    "named": ("attend", lambda *_: named_request(3, 2)),
    "stream": ("attend_stream", lambda _, at: streamed(self_request(3, 2), str(at))),
    "stream, no id": ("attend_stream", lambda *_: streamed(cross_request(2))),
    "stream, named": ("attend_stream", lambda _, at: streamed(named_request(2), f"id {at}")),
}


@pytest.mark.parametrize(("method", "make"), ALIKE.values(), ids=ALIKE)
def test_requests_that_differ_in_vectors_and_id(
    methods: Methods,
    models: dict[str, LoadedModel],
    method: str,
    make: Callable[[dict[str, LoadedModel], int], Message],
) -> None:
    asserted_alike(getattr(methods, method), partial(make, models))


def test_a_large_request_that_is_recognised_needs_no_codec_thread(
    attend: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = self_request(5000).SerializeToString()
    assert len(data) > LARGE_BYTES
    handed_over: list[object] = []
    run_on_thread = CodecThreads.run

    def counted(threads: CodecThreads, work: Callable[[], Any], deadline: float) -> Any:
        handed_over.append(work)
        return run_on_thread(threads, work, deadline)

    monkeypatch.setattr(CodecThreads, "run", counted)
    expected = attend.answer(data)
    assert len(handed_over) == 2  # to parse, and to decode
    assert attend.recognised(data) == expected
    assert len(handed_over) == 2


def with_lengths(models: dict[str, LoadedModel]) -> pb.ModelInferRequest:
    message = infer_request(models[SELF], 2)
    message.inputs.add(name="key_lengths", datatype="INT64", shape=[2])
    message.raw_input_contents.append(np.array([3, 2]).tobytes())
    return message


def with_timeout(models: dict[str, LoadedModel]) -> pb.ModelInferRequest:
    message = infer_request(models[SELF])
    message.parameters["timeout"].int64_param = 60_000_000
    return message


def in_half_precision(models: dict[str, LoadedModel]) -> pb.ModelInferRequest:
    message = infer_request(models[SELF])
    message.inputs[0].datatype = "FP16"
    message.raw_input_contents[0] = np.ones((3, 4), np.float16).tobytes()
    return message


def of_tokens(models: dict[str, LoadedModel]) -> pb.ModelInferRequest:
    return raw_request(models[TEXT], {models[TEXT].inputs[0].name: np.array([[0, 1, 2]])})


# What vectors, texts, the time or other copies decide; what is rare; and what is too long.
NOT_KEPT: dict[str, tuple[str, Callable[[dict[str, LoadedModel]], Message]]] = {
    "key lengths": ("infer", with_lengths),
    "timeout": ("infer", with_timeout),
    "FP16": ("infer", in_half_precision),
    "tokens": ("infer", of_tokens),
    "texts": ("infer", lambda models: text_request(models[TEXT], [b"Life is short"])),
    "mask": (
        "attend",
        lambda _: self_request(3, mask=typed.AttentionMask(kind=typed.AttentionMask.KIND_KEYS, bits=b"\x07")),
    ),
    "many sequences": ("attend", lambda _: self_request(*[1] * 9)),
}


@pytest.mark.parametrize(("method", "make"), NOT_KEPT.values(), ids=NOT_KEPT)
def test_other_requests_are_not_kept(
    methods: Methods,
    models: dict[str, LoadedModel],
    method: str,
    make: Callable[[dict[str, LoadedModel]], Message],
) -> None:
    own, data = getattr(methods, method), make(models).SerializeToString()
    assert own.answer(data) == own.answer(data)
    assert not own.hits(data)


def test_a_request_with_more_beside_its_vectors_is_answered_and_not_kept(attend: Method) -> None:
    data = self_request(2).SerializeToString()
    unknown = b"\x98\x06\x01" * inference.MAX_REST_BYTES
    assert attend.decoded(data + unknown) == attend.decoded(data)
    assert not attend.hits(data + unknown)


def test_a_request_with_booleans_is_not_kept(self_model: LoadedModel) -> None:
    """Only its content shows whether it is valid: booleans are 0 or 1."""
    graphs = {
        kind: graph.model_copy(
            update={"inputs": tuple(spec.model_copy(update={"data_type": "bool"}) for spec in graph.inputs)}
        )
        for kind, graph in self_model.manifest.graphs.items()
    }
    manifest = self_model.manifest.model_copy(update={"graphs": graphs})
    decoded, _ = decode_infer(infer_request(self_model), self_model)
    assert _depends_on_form(decoded, self_model)
    assert not _depends_on_form(decoded, dataclasses.replace(self_model, manifest=manifest))


def test_an_id_that_is_not_utf8_is_refused_as_ever(infer: Method, self_model: LoadedModel) -> None:
    data = infer_request(self_model).SerializeToString()
    infer.decoded(data)
    at = data.index(b"\x1a\x017")
    assert not infer.hits(data[: at + 2] + b"\xff" + data[at + 3 :])


@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "stream"])
def test_a_recognised_request_whose_run_was_padded(
    models: dict[str, LoadedModel], threads: CodecThreads, *, is_streamed: bool
) -> None:
    """Its outputs are views of padded ones, with gaps between their rows."""
    engine = Engine(Repository([costing(models[CROSS], SAME_FOR_ALL)]))

    def make(at: int) -> Message:
        request = cross_request(2, 3)
        request.return_weights = True
        return typed.AttendStreamRequest(id=f"{at}", request=request) if is_streamed else request

    asserted_alike(Method((AttendStream if is_streamed else Attend)(engine, threads)), make)
    engine.close()


def test_few_requests_of_one_size_are_kept(infer: Method, self_model: LoadedModel) -> None:
    data = []
    for rows in range(MAX_ALIKE + 1):
        message = infer_request(self_model)
        message.outputs.add(name="context_vectors").parameters[f"unknown {rows}"].bool_param = True
        data.append(message.SerializeToString())
        infer.decoded(data[-1])

    assert [infer.hits(one) for one in data] == [False] + [True] * MAX_ALIKE

    infer.recognised(data[1])
    infer.decoded(data[0])
    assert [infer.hits(one) for one in data[:3]] == [True, True, False]


def test_the_least_recently_used_is_dropped(attend: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "CACHED_SIZES", 3)
    data = [self_request(rows).SerializeToString() for rows in range(1, 6)]
    for one in data:
        attend.decoded(one)
        attend.recognised(data[0])

    assert [attend.hits(one) for one in data] == [True, False, False, True, True]


def test_a_model_that_was_replaced_is_not_used(threads: CodecThreads, self_model: LoadedModel) -> None:
    repository = Repository([self_model])
    engine = Engine(repository)
    infer = Method(ModelInfer(engine, threads))
    data = infer_request(self_model).SerializeToString()
    infer.decoded(data)
    assert infer.hits(data)

    repository.replace(SELF, {})
    with pytest.raises(ModelNotFoundError):
        infer.answer(data)
    repository.replace(SELF, {self_model.version: self_model})
    assert not infer.hits(data)
    infer.decoded(data)
    assert infer.recognised(data)


def test_a_model_that_is_still_in_use_keeps_no_other_out_and_is_freed_after_its_last_request(
    artifacts: Path, models: dict[str, LoadedModel], threads: CodecThreads
) -> None:
    last_request = dataclasses.replace(models[SELF])
    freed = weakref.ref(last_request)
    control = RepositoryControl(ModelStore(artifacts, Device()), Repository([last_request, models[CROSS]]))
    engine = Engine(control.repository)
    method = Method(ModelInfer(engine, threads))
    data = {name: infer_request(models[name]).SerializeToString() for name in (SELF, CROSS)}
    for one in data.values():
        method.decoded(one)
    control.unload(SELF)

    assert method.hits(data[CROSS])
    assert not method.hits(data[SELF])
    assert freed() is not None
    del last_request
    engine.close()
    assert freed() is None


@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "stream"])
def test_what_is_known_of_a_changed_message_is_what_it_says(
    methods: Methods, models: dict[str, LoadedModel], *, is_streamed: bool
) -> None:
    """A message that passes for a known one is answered as its own fields demand."""
    request = streamed(cross_request(2, 1), "some id") if is_streamed else infer_request(models[CROSS], 2)
    method, message = methods.attend_stream if is_streamed else methods.infer, request.SerializeToString()
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
            assert method.recognised(changed) == method.decoded(changed)
    assert found > 30
