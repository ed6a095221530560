"""Whatever 64 KiB a caller sends, they are decoded or refused within 100 ms and 10 MB."""

import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import codec
from attention_serving.server.api.open_inference import codec as open_inference
from attention_serving.server.api.open_inference.tensors import KNOWN_DATATYPES
from attention_serving.server.api.protobuf_bytes import reader
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.tokenizer import FEW_TEXTS
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.http import embeddings, schemas
from attention_serving.server.http import infer as http
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.server.api.messages import read_attend, read_infer
from tests.server.samples import CROSS, SELF, TEXT
from tests.support.artifacts import cached_repositories

MAX_MESSAGE, MAX_BYTES, MAX_SECONDS = 64 << 10, 10_000_000, 0.3
LIMITS = Limits()
EDGES = (0, 1, 2, 3, 4, 4096, 4097, 1 << 20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**63))
sizes = st.sampled_from(EDGES) | st.integers(-3, 9)
shapes = st.lists(sizes, max_size=5)
# Numbers of elements, and the elements, of repeated fields.
counts = st.sampled_from((0, 1, 2, 3, 4096, 4097, 30_000)) | st.integers(0, 9)
uint32 = st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1)) | st.integers(0, 9)


def repeated(element: st.SearchStrategy[int] = uint32) -> st.SearchStrategy[list[int]]:
    """A few numbers, or one of them very often."""
    often = st.builds(lambda number, count: [number] * count, element, counts)
    return st.lists(element, max_size=4) | often


@dataclass(frozen=True)
class Message:
    """A serialized request, which is shown in few characters if a test fails."""

    data: bytes
    shown: str = field(repr=False)

    def __repr__(self) -> str:
        return self.shown[:500]


def cheap(decode: Callable[[], object]) -> None:
    """Runs a decoder, which may refuse what it is given, and checks what that took."""
    seconds = math.inf
    for _ in range(3):  # what is slow by itself is slow each time
        if seconds > MAX_SECONDS:
            started = time.thread_time()
            with suppress(EngineError, HTTPException, DecodeError):
                decode()
            seconds = time.thread_time() - started
    assert seconds < MAX_SECONDS
    tracemalloc.start()
    try:
        with suppress(EngineError, HTTPException, DecodeError):
            decode()
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def _without_other_objects() -> Iterator[None]:
    """Keeps the garbage collector away from the many objects of the tests' other modules."""
    gc.freeze()
    yield
    gc.unfreeze()


def many(test: Callable[..., None]) -> Callable[..., None]:
    """A property that is tried on many examples."""
    often = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
    tried: Callable[..., None] = pytest.mark.thorough(often(test))
    return tried


@pytest.fixture(scope="module")
def encoder() -> LoadedModel:
    (folder,) = cached_repositories(SENTENCE_MODELS)
    return load_model(folder / SENTENCE / "1", Device(threads=1))


def infer(data: bytes, model: LoadedModel) -> None:
    """Decodes and validates a request of the Open Inference Protocol."""
    allowance = Allowance(LIMITS, MemoryBudget(64 * MIB).reserve(len(data)))
    request, _ = open_inference.decode(read_infer(data), model, math.inf, allowance)
    validate(request, model, LIMITS)


names = st.sampled_from(("query", "key", "value", "token_ids", "text", "attention_mask", "key_lengths"))
inputs = st.tuples(names, st.sampled_from(KNOWN_DATATYPES), shapes, counts)


@many
@example([("query", "FP32", [2**31, 0, 64], 0)], SELF, "raw", ["context_vectors"])
@example([("query", "FP32", [10_000_000, 3, 0], 0)], SELF, "typed", [])
@example([("token_ids", "INT64", [0, 2**31], 0)], TEXT, "raw", ["tokens"])
@given(
    st.lists(inputs, max_size=4),
    st.sampled_from((SELF, CROSS, TEXT)),
    st.sampled_from(("raw", "typed")),
    st.lists(st.sampled_from(("context_vectors", "attention_weights", "tokens", "embedding")), max_size=3),
)
def test_shapes_of_the_open_inference_protocol(
    loaded: Repository,
    tensors: list[tuple[str, str, list[int], int]],
    model: str,
    form: str,
    outputs: list[str],
) -> None:
    message = pb.ModelInferRequest(model_name=model)
    message.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs)
    for name, datatype, shape, count in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if form == "raw":
            message.raw_input_contents.append(bytes(count // len(tensors)))
        else:
            tensor.contents.fp32_contents.extend([0.0] * (count // 8))
    data = message.SerializeToString()
    assert len(data) < MAX_MESSAGE
    cheap(lambda: infer(data, loaded.ready(model)))


def shown(message: typed.AttendRequest) -> Message:
    data = message.SerializeToString()
    return Message(data, f"{len(data)} bytes: " + " ".join(str(message).split()))


def attend(data: bytes, model: LoadedModel) -> None:
    """Decodes and validates a request of attention.v1."""
    allowance = Allowance(LIMITS, MemoryBudget(64 * MIB).reserve(len(data)))
    names = codec.input_names(model)
    request = codec.decode(read_attend(data), names, math.inf, allowance)
    if len(request.texts) <= FEW_TEXTS or len(request.texts) > LIMITS.max_sequences:
        validate(request, model, LIMITS)  # others are tokenized on threads of their own


vectors = st.builds(
    lambda lengths, width, size: typed.VectorSequences(
        data_type=typed.DATA_TYPE_FP32, lengths=lengths, width=width, data=bytes(size)
    ),
    repeated(),
    uint32,
    counts,
)
spans = st.builds(
    lambda lengths, starts, ends: typed.EmbeddingOptions(
        spans=typed.Spans(lengths=lengths, starts=starts, ends=ends)
    ),
    repeated(),
    repeated().map(lambda own: own[:3000]),
    repeated().map(lambda own: own[:3000]),
)
selections = st.builds(
    lambda layers, heads: typed.HeadSelection(layers=layers, heads=heads), repeated(), repeated()
)
tokens = st.builds(
    lambda lengths, ids: typed.TokenSequences(lengths=lengths, ids=ids),
    repeated(),
    repeated(st.integers(-1, 9)),
)
texts = st.builds(
    lambda count, text: typed.TextSequences(texts=[text] * count),
    counts,
    st.sampled_from(("", "a", "dessert")),
)
masks = st.builds(
    lambda kind, size: typed.AttentionMask(kind=kind, bits=bytes(size)), st.integers(0, 4), counts
)
requests: st.SearchStrategy[typed.AttendRequest] = st.one_of(
    st.builds(lambda query, mask: typed.AttendRequest(query=query, mask=mask), vectors, masks | st.none()),
    st.builds(
        lambda ids, positions, selection: typed.AttendRequest(
            token_ids=ids, positions=positions, head_selection=selection, return_weights=True
        ),
        tokens,
        repeated(),
        selections,
    ),
    st.builds(lambda text, options: typed.AttendRequest(text=text, embedding=options), texts, spans),
    st.builds(lambda ids, options: typed.AttendRequest(token_ids=ids, embedding=options), tokens, spans),
)


@many
@example(
    shown(
        typed.AttendRequest(
            query=typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=4, lengths=[0] * 60_000)
        )
    )
)
@example(shown(typed.AttendRequest(token_ids=typed.TokenSequences(lengths=[1] * 30_000, ids=[1] * 30_000))))
@example(shown(typed.AttendRequest(text=typed.TextSequences(texts=[""] * 30_000))))
@given(requests.map(shown))
def test_counts_of_attention_v1(loaded: Repository, encoder: LoadedModel, message: Message) -> None:
    if len(message.data) <= MAX_MESSAGE:
        for model in (loaded.ready(SELF), encoder):
            cheap(partial(attend, message.data, model))


@pytest.mark.thorough
def test_a_query_that_is_replaced_again_and_again() -> None:
    """Each of its kinds replaces the other, beside the contents of many inputs."""
    inputs = typed.AttendRequest(inputs=[typed.NamedTensors(data=b"0")] * 5000).SerializeToString()
    data = inputs + b"\x1a\x00\x2a\x00" * 5000
    assert len(data) < MAX_MESSAGE
    cheap(lambda: read_attend(data))


def http_infer(body: bytes) -> None:
    budget = MemoryBudget(64 * MIB)
    budget.reserve(schemas.memory_of(body, len(body)))
    http.decode(bytearray(body), len(body), "m", "", 64 * MIB, budget.reserve(0))


json_data = st.lists(
    st.recursive(
        st.integers(-1, 3) | st.booleans() | st.none() | st.just("a"),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=20,
    ),
    max_size=4,
)


@many
@example([("query", "FP32", [2**31, 0, 64], [], 1)])
@example([("query", "FP32", [2**31, 0], [[]], 15_000)])
@given(st.lists(st.tuples(names, st.sampled_from(KNOWN_DATATYPES), shapes, json_data, counts), max_size=3))
def test_shapes_in_json(tensors: list[tuple[str, str, list[int], list[object], int]]) -> None:
    document = {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": shape, "data": data * count}
            for name, datatype, shape, data, count in tensors
        ]
    }
    body = json.dumps(document, separators=(",", ":")).encode()
    if len(body) <= MAX_MESSAGE:
        cheap(lambda: http_infer(body))


@many
@example([10_000], 800)
@given(st.lists(counts, max_size=3), counts)
def test_token_lists_of_embeddings(lengths: list[int], count: int) -> None:
    lists = [[1] * length for length in lengths] + [[1]] * count
    body = json.dumps({"model": SENTENCE, "input": lists}, separators=(",", ":")).encode()
    if len(body) <= MAX_MESSAGE:
        cheap(lambda: embeddings.decode(bytearray(body)))


@pytest.mark.parametrize("count", [FEW_TEXTS, FEW_TEXTS + 1])
def test_many_short_texts_are_not_tokenized_on_the_thread_that_takes_calls(count: int) -> None:
    message = pb.ModelInferRequest()
    message.inputs.add(name="text", datatype="BYTES", shape=[count])
    request = typed.AttendRequest(text=typed.TextSequences(texts=["a"] * count))
    streamed = reader(typed.AttendStreamRequest, codec.PATHS, LIMITS.max_sequences, within="request")
    found = [
        open_inference.is_slow(read_infer(message.SerializeToString())),
        codec.is_slow(read_attend(request.SerializeToString())),
        codec.is_slow(streamed(typed.AttendStreamRequest(request=request).SerializeToString())),
    ]
    assert found == [count > FEW_TEXTS] * 3
