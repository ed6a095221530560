"""Requests that are almost right, or huge on paper, are answered or refused with a reason, at little cost."""

import gc
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import schemas, text_bodies
from attention_serving.server.api.attention import requests as attention
from attention_serving.server.api.open_inference import requests as open_inference
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.api.wire import encode_field, make_parser
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import Code, EngineError, InvalidRequestError, OverloadedError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.requests.tokenizer import INLINE_MAX_TEXTS
from attention_serving.server.engine.requests.validation import tokenize_texts, validate
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.http import infer as http_infer
from attention_serving.server.http.connection import HttpError
from attention_serving.server.settings import Settings
from tests.encoders.repository import SENTENCE
from tests.server.api.messages import decode_infer, read_attend, read_infer
from tests.server.samples import SELF, TEXT
from tests.support.contradictions import Made, good_and_changed
from tests.support.coroutines import reserve
from tests.support.encoders import WIDTH
from tests.support.mutations import ATTEND, INFER

Models = Callable[[str, str], LoadedModel]
# What 64 KiB may cost. On a quiet machine they take a third of the time.
MAX_MESSAGE, MAX_BYTES, MAX_SECONDS = 64 << 10, 10_000_000, 0.3
JSON_SIZE = "Inference-Header-Content-Length"
SETTINGS = Settings.model_validate({"model_repository": "."})


def decode(
    made: Made, models: Models, limits: Limits | None = None, budget: MemoryBudget | None = None
) -> Request | None:
    """Reads, decodes and validates a request as the server or the HTTP process does."""
    limits, budget = limits or Limits(), budget or MemoryBudget(64 * MIB)
    if made.method == "/v1/embeddings":
        schemas.parse(made.data, text_bodies.EmbeddingRequest).message(SETTINGS.max_message_bytes)
        return None
    if made.method not in (ATTEND, INFER):
        size, body = (made.headers or {}).get(JSON_SIZE, ""), bytearray(made.data)
        own = min(int(size), len(body)) if size.isdecimal() else len(body)
        reserve(budget, schemas.memory_of(body, own))
        http_infer.decode(body, own, "m", "", 64 * MIB, Reservation(budget))
        return None
    allowance = Allowance(limits, reserve(budget, len(made.data)))
    parsed: Any = (read_attend if made.method == ATTEND else read_infer)(made.data, limits)
    message: typed.AttendRequest | pb.ModelInferRequest = parsed.message
    model = models(message.model_name, message.model_version)
    if isinstance(message, pb.ModelInferRequest):
        request, _ = decode_infer(parsed, model, allowance=allowance)
    elif message.inputs:
        outputs = attention.output_names(message, model)
        request, _ = attention.decode_named(parsed, model, outputs, allowance)
    else:
        heads, names = attention.encoder_outputs(message, model), attention.map_fields_to_inputs(model)
        request = attention.decode(parsed, names, allowance)
        request.encoder_outputs = heads
        if INLINE_MAX_TEXTS < len(request.texts) <= limits.max_sequences:
            return None  # many texts are encoded on threads of their own
        request = tokenize_texts(request, model, limits)
    return validate(request, model, limits)


@pytest.fixture(scope="module")
def ready(loaded: Repository, sentence_repository: Path) -> Models:
    """The models of the tests, by name."""
    encoder = load_model(sentence_repository / SENTENCE / "1", Device(threads=1))
    return lambda name, _: encoder if name == SENTENCE else loaded.ready(name)


Cheap = Callable[..., bool]


@pytest.fixture
def cheap() -> Iterator[Cheap]:
    """Runs a decoder, checks what that took, and returns whether it refused what it was given."""

    def refused(decoder: Callable[[], object]) -> bool:
        try:
            decoder()
        except EngineError as error:
            assert error.code is not Code.INTERNAL  # noqa: PT017 - of those that refuse
            return True
        except (HttpError, DecodeError):
            return True
        return False

    def check(decoder: Callable[[], object], most_bytes: int = MAX_BYTES) -> bool:
        seconds = math.inf
        for _ in range(3):  # what is slow by itself is slow each time
            if seconds > MAX_SECONDS:
                started = time.thread_time()
                refused(decoder)
                seconds = time.thread_time() - started
        assert seconds < MAX_SECONDS
        tracemalloc.start()
        try:
            found = refused(decoder)
            assert tracemalloc.get_traced_memory()[1] < most_bytes
        finally:
            tracemalloc.stop()
        return found

    gc.freeze()  # keeps the garbage collector away from the many objects of the tests' other modules
    yield check
    gc.unfreeze()


def attend(model: str = SELF, **fields: Any) -> Made:
    return Made(ATTEND, typed.AttendRequest(model_name=model, **fields).SerializeToString())


def infer(shape: Sequence[int]) -> Made:
    message = pb.ModelInferRequest(model_name=SELF, raw_input_contents=[b""])
    message.inputs.add(name="query", datatype="FP32", shape=shape)
    return Made(INFER, message.SerializeToString())


MOST = 2**32 - 1
FP32 = typed.DATA_TYPE_FP32
HUGE_SPANS = typed.EmbeddingOptions(spans=typed.Spans(lengths=[1] * 3000, starts=[0] * 3000, ends=[1] * 3000))
# Each kind of query replaces the other, beside the contents of many inputs.
REPLACED = typed.AttendRequest(inputs=[typed.NamedTensors(data=b"0")] * 5000).SerializeToString()
TOKEN_LISTS = json.dumps({"model": SENTENCE, "input": [[1] * 10_000, *[[1]] * 800]}, separators=(",", ":"))
LONGEST = typed.VectorSequences(data_type=FP32, width=MOST, lengths=[MOST] * 4096)
EXTREME: dict[str, Made] = {
    "no elements": infer([2**31, 0, 64]),
    "empty sequences": attend(query=typed.VectorSequences(data_type=FP32, width=4, lengths=[0] * 60_000)),
    "longest sequences": attend(query=LONGEST),
    "tokens": attend(TEXT, token_ids=typed.TokenSequences(lengths=[1] * 30_000, ids=[1] * 30_000)),
    "spans of texts": attend(SENTENCE, text=typed.TextSequences(texts=["a"] * 3000), embedding=HUGE_SPANS),
    "replaced queries": Made(ATTEND, REPLACED + b"\x1a\x00\x2a\x00" * 5000),
    "token lists, JSON": Made("/v1/embeddings", TOKEN_LISTS.encode(), {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("made", EXTREME.values(), ids=EXTREME)
def test_what_is_huge_on_paper_costs_little(made: Made, ready: Models, cheap: Cheap) -> None:
    assert len(made.data) <= 2 * MAX_MESSAGE
    cheap(lambda: decode(made, ready))


def spans(count: int) -> Made:
    """A text with some parts."""
    parts = typed.Spans(lengths=[count], starts=[0] * count, ends=[1] * count)
    text = typed.TextSequences(texts=["eat dessert first"])
    return attend(SENTENCE, text=text, embedding=typed.EmbeddingOptions(spans=parts))


def more_numbers(number: int, content: bytes) -> Made:
    """A good request, and the packed content of a further field of its spans."""
    return Made(ATTEND, b"".join([spans(1).data, *encode_field((12, 2, number), [content])]))


SPANS: dict[str, tuple[Callable[[], Made], str]] = {
    "10 M starts": (lambda: more_numbers(2, bytes(40 * MIB)), "have 10485761 starts; the lengths sum to 1"),
    "40 M lengths": (lambda: more_numbers(1, b"\1" * (40 * MIB)), "contains 41943041 sequences; the limit"),
    "a length of 4 G": (lambda: more_numbers(1, b"\xff\xff\xff\xff\x0f"), "lengths sum to 4294967296"),
    "300 k spans": (lambda: spans(300_000), "would have 4800000 bytes decoded; the limit is 4194304"),
}


@pytest.mark.parametrize(("build", "says"), SPANS.values(), ids=SPANS)
def test_spans_are_refused_cheaply(build: Callable[[], Made], says: str, ready: Models, cheap: Cheap) -> None:
    made, limits = build(), Limits(max_input_bytes=4 * MIB)
    cheap(lambda: decode(made, ready, limits), most_bytes=2 * MIB)
    with pytest.raises(InvalidRequestError, match=f"^spans: .*{says}"):
        decode(made, ready, limits)


def test_the_memory_of_spans_is_reserved(ready: Models) -> None:
    count = 6000
    made = spans(count)
    budget = MemoryBudget(len(made.data) + 8 * count)
    other = reserve(budget, 1)
    with pytest.raises(OverloadedError):
        decode(made, ready, budget=budget)
    other.release()
    validated = decode(made, ready)
    assert validated is not None
    assert validated.plan.required_bytes > 2 * count * 4 * WIDTH


CHANGED = good_and_changed()


@pytest.mark.parametrize("index", range(len(CHANGED)))
def test_64_kib_are_answered_or_refused_at_little_cost(index: int, ready: Models, cheap: Cheap) -> None:
    rng = random.Random(index)  # noqa: S311 - the same changes every time
    good, change = CHANGED[index]
    decode(good, ready)
    changed = [made for made in (change(rng) for _ in range(200)) if len(made.data) <= MAX_MESSAGE]
    refused = sum(cheap(partial(decode, made, ready)) for made in changed)
    assert 0 < refused < len(changed)


@pytest.mark.parametrize("count", [INLINE_MAX_TEXTS, INLINE_MAX_TEXTS + 1])
def test_many_short_texts_are_not_tokenized_on_the_thread_that_takes_calls(count: int) -> None:
    message = pb.ModelInferRequest()
    message.inputs.add(name="text", datatype="BYTES", shape=[count])
    request = typed.AttendRequest(text=typed.TextSequences(texts=["a"] * count))
    streamed = make_parser(typed.AttendStreamRequest, attention.PATHS, 4096, request_field="request")
    found = [
        open_inference.is_slow(read_infer(message.SerializeToString())),
        attention.is_slow(read_attend(request.SerializeToString())),
        attention.is_slow(streamed(typed.AttendStreamRequest(request=request).SerializeToString())),
    ]
    assert found == [count > INLINE_MAX_TEXTS] * 3
