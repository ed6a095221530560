"""Requests that are recognised by the bytes around their vectors: they are answered as if they were not."""

import dataclasses
import math
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf.message import Message

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import request_cache
from attention_serving.server.api.attention.service import Attend, AttendStream
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import LARGE_BYTES, CallKind
from attention_serving.server.api.open_inference.service import ModelInfer, ModelStreamInfer
from attention_serving.server.api.request_cache import MAX_ALIKE, RequestCache
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, ModelNotFoundError
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Array
from tests.server.api.calls.scripted import ScriptedCall
from tests.server.api.messages import packed, raw_request
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


@pytest.fixture
def engine(loaded: Repository) -> Iterator[Engine]:
    engine = Engine(loaded)
    yield engine
    engine.close()


@pytest.fixture
def infer(engine: Engine, threads: CodecThreads) -> Method:
    return Method(ModelInfer(engine, threads))


@pytest.fixture
def stream_infer(engine: Engine, threads: CodecThreads) -> Method:
    return Method(ModelStreamInfer(engine, threads))


@pytest.fixture
def attend(engine: Engine, threads: CodecThreads) -> Method:
    return Method(Attend(engine, threads))


@pytest.fixture
def attend_stream(engine: Engine, threads: CodecThreads) -> Method:
    return Method(AttendStream(engine, threads))


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


def named_request(*lengths: int, reverse: bool = False) -> typed.AttendRequest:
    inputs = [
        named(name, *(rng.standard_normal((length, width), np.float32) for length in lengths))
        for name, width in WIDTHS.items()
    ]
    return typed.AttendRequest(model_name=CROSS, inputs=inputs[::-1] if reverse else inputs)


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


@pytest.mark.parametrize("name", [SELF, CROSS])
@pytest.mark.parametrize(("batch", "outputs"), [(1, ()), (3, ()), (2, ("attention_weights",))])
def test_infer(
    infer: Method, models: dict[str, LoadedModel], name: str, batch: int, outputs: tuple[str, ...]
) -> None:
    def make(at: int) -> pb.ModelInferRequest:
        message = infer_request(models[name], batch, 3, *outputs)
        message.id = f"request {at}"
        return message

    asserted_alike(infer, make)


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


def test_requests_that_are_large(infer: Method, attend: Method, self_model: LoadedModel) -> None:
    asserted_alike(infer, lambda _: infer_request(self_model, 4, 3000))
    asserted_alike(attend, lambda _: self_request(3000, 2000))


def test_a_large_request_that_is_recognised_needs_no_codec_thread(
    infer: Method,
    attend: Method,
    attend_stream: Method,
    self_model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streamed = typed.AttendStreamRequest(request=self_request(5000))
    messages = (infer_request(self_model, 1, 5000), self_request(5000), streamed)
    data = [message.SerializeToString() for message in messages]
    assert min(map(len, data)) > LARGE_BYTES
    methods = (infer, attend, attend_stream)
    expected = [method.answer(each) for method, each in zip(methods, data, strict=True)]
    handed_over: list[object] = []
    run_on_thread = CodecThreads.run

    def counted(threads: CodecThreads, work: Callable[[], Any], deadline: float) -> Any:
        handed_over.append(work)
        return run_on_thread(threads, work, deadline)

    monkeypatch.setattr(CodecThreads, "run", counted)
    assert [method.recognised(each) for method, each in zip(methods, data, strict=True)] == expected
    assert handed_over == []
    assert [method.decoded(each) for method, each in zip(methods, data, strict=True)] == expected
    assert len(handed_over) == 2 * len(methods)  # to parse, and to decode


@pytest.mark.parametrize("reverse", [False, True])
def test_inputs_by_name(attend: Method, attend_stream: Method, *, reverse: bool) -> None:
    asserted_alike(attend, lambda _: named_request(3, 2, reverse=reverse))
    asserted_alike(attend, lambda _: named_request(3000, reverse=reverse))
    asserted_alike(
        attend_stream,
        lambda at: typed.AttendStreamRequest(id=f"id {at}", request=named_request(2, reverse=reverse)),
    )


def test_inputs_in_another_order(infer: Method, cross_model: LoadedModel) -> None:
    def make(_: int) -> pb.ModelInferRequest:
        message = infer_request(cross_model, 2)
        message.inputs.reverse()
        message.raw_input_contents.reverse()
        return message

    asserted_alike(infer, make)


def test_infer_in_a_stream_of_tritons_clients(stream_infer: Method, self_model: LoadedModel) -> None:
    def make(at: int) -> pb.ModelInferRequest:
        message = infer_request(self_model)
        message.id = str(at)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message

    asserted_alike(stream_infer, make)
    response = pb.ModelStreamInferResponse.FromString(stream_infer.recognised(make(5).SerializeToString()))
    assert response.infer_response.id == "5"
    assert response.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(
    "make",
    [
        lambda _: self_request(3),
        lambda _: self_request(3, 1, 2),
        lambda _: self_request(3, 2, return_weights=True),
        lambda _: self_request(3, output_data_type=typed.DATA_TYPE_FP16),
        lambda _: cross_request(2, 3),
    ],
    ids=["one", "ragged", "weights", "FP16 out", "cross"],
)
def test_attend(attend: Method, make: Callable[[int], typed.AttendRequest]) -> None:
    asserted_alike(attend, make)


def test_attend_in_a_stream(attend_stream: Method) -> None:
    asserted_alike(
        attend_stream, lambda at: typed.AttendStreamRequest(id=str(at), request=self_request(3, 2))
    )
    asserted_alike(attend_stream, lambda _: typed.AttendStreamRequest(request=cross_request(2)))


def with_lengths(model: LoadedModel) -> pb.ModelInferRequest:
    message = infer_request(model, 2)
    message.inputs.add(name="key_lengths", datatype="INT64", shape=[2])
    message.raw_input_contents.append(np.array([3, 2]).tobytes())
    return message


def with_timeout(model: LoadedModel) -> pb.ModelInferRequest:
    message = infer_request(model)
    message.parameters["timeout"].int64_param = 60_000_000
    return message


def in_half_precision(model: LoadedModel) -> pb.ModelInferRequest:
    message = infer_request(model)
    message.inputs[0].datatype = "FP16"
    message.raw_input_contents[0] = np.ones((3, 4), np.float16).tobytes()
    return message


def as_numbers(model: LoadedModel) -> pb.ModelInferRequest:
    message = infer_request(model)
    message.inputs[0].contents.fp32_contents.extend(np.frombuffer(message.raw_input_contents.pop(), "<f4"))
    return message


def test_vectors_as_numbers(infer: Method, self_model: LoadedModel) -> None:
    asserted_alike(infer, lambda _: as_numbers(self_model))


@pytest.mark.parametrize("make", [with_lengths, with_timeout, in_half_precision])
def test_what_its_vectors_or_the_time_decide_is_not_kept(
    infer: Method, self_model: LoadedModel, make: Callable[[LoadedModel], pb.ModelInferRequest]
) -> None:
    data = make(self_model).SerializeToString()
    assert infer.decoded(data) == infer.decoded(data)

    assert not infer.hits(data)


def test_ids_of_tokens_and_texts_are_not_kept(infer: Method, text_model: LoadedModel) -> None:
    tokens = raw_request(text_model, {text_model.inputs[0].name: np.array([[0, 1, 2]])})
    texts = pb.ModelInferRequest(model_name=TEXT, raw_input_contents=[packed([b"Life is short"])])
    texts.inputs.add(name="text", datatype="BYTES", shape=[1])
    for message in (tokens, texts):
        data = message.SerializeToString()
        infer.decoded(data)
        assert not infer.hits(data)


def test_masks_and_many_sequences_are_not_kept(attend: Method) -> None:
    mask = typed.AttentionMask(kind=typed.AttentionMask.KIND_KEYS, bits=b"\x07")
    for message in (self_request(3, mask=mask), self_request(*[1] * 9)):
        data = message.SerializeToString()
        attend.decoded(data)
        assert not attend.hits(data)


def test_refused_requests_are_not_kept(infer: Method, self_model: LoadedModel) -> None:
    message = infer_request(self_model)
    message.inputs[0].shape[1] += 1
    data = message.SerializeToString()
    with pytest.raises(EngineError):
        infer.decoded(data)

    assert not infer.hits(data)


def test_another_shape_of_the_same_size_is_another_request(infer: Method, self_model: LoadedModel) -> None:
    one, other = (infer_request(self_model, *shape) for shape in ((2, 3), (3, 2)))
    infer.decoded(one.SerializeToString())
    data = other.SerializeToString()
    assert len(data) == one.ByteSize()
    assert not infer.hits(data)

    expected = infer.decoded(data)
    assert infer.recognised(data) == expected
    assert infer.recognised(one.SerializeToString())


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


def test_few_sizes_are_kept(attend: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cache, "CACHED_SIZES", 3)
    data = [self_request(rows).SerializeToString() for rows in range(1, 6)]
    for one in data:
        attend.decoded(one)

    assert [attend.hits(one) for one in data] == [False, False, True, True, True]


def test_the_least_recently_used_is_dropped(attend: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cache, "CACHED_SIZES", 3)
    data = [self_request(rows).SerializeToString() for rows in range(1, 6)]
    for one in data:
        attend.decoded(one)
        attend.recognised(data[0])

    assert [attend.hits(one) for one in data] == [True, False, False, True, True]


def test_unknown_messages_displace_none(attend: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cache, "CACHED_SIZES", 3)
    known = self_request(1).SerializeToString()
    attend.decoded(known)
    for size in range(100, 200):
        assert not attend.hits(bytes(size))

    assert attend.hits(known)


@pytest.mark.parametrize("name", ["infer", "attend"])
def test_a_valid_request_that_cannot_be_learned_is_answered(
    name: str, infer: Method, attend: Method, self_model: LoadedModel
) -> None:
    """It has more beside its vectors than requests that are kept."""
    unknown = b"\x98\x06\x01" * request_cache.MAX_REST_BYTES
    method = infer if name == "infer" else attend
    request = infer_request(self_model) if name == "infer" else self_request(2)
    data = request.SerializeToString()
    assert method.decoded(data + unknown) == method.decoded(data)
    assert not method.hits(data + unknown)


def test_an_id_that_is_no_text_is_refused_as_ever(infer: Method, self_model: LoadedModel) -> None:
    data = infer_request(self_model).SerializeToString()
    infer.decoded(data)
    at = data.index(b"\x1a\x017")

    assert not infer.hits(data[: at + 2] + b"\xff" + data[at + 3 :])


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


@pytest.mark.parametrize("kind", [CallKind.UNARY, CallKind.ORDERED_STREAM])
def test_what_is_known_of_a_changed_message_is_what_it_says(
    infer: Method, attend_stream: Method, models: dict[str, LoadedModel], kind: CallKind
) -> None:
    """A message that passes for a known one is answered as its own fields demand."""
    if kind is CallKind.UNARY:
        method, message = infer, infer_request(models[CROSS], 2).SerializeToString()
    else:
        request = typed.AttendStreamRequest(id="some id", request=cross_request(2, 1))
        method, message = attend_stream, request.SerializeToString()
    method.decoded(message)
    found, changes = 0, random.Random(7)  # noqa: S311 - the same every time
    for _ in range(3000):
        if changes.random() < 0.5:
            data = bytearray(message)
            data[changes.randrange(len(data))] ^= 1 << changes.randrange(8)
            changed = bytes(data)
        else:
            changed = mutated(Good("", message), changes)
        if method.hits(changed):
            found += 1
            assert method.recognised(changed) == method.decoded(changed)
    assert found > 100
