"""Requests that are almost right, or huge on paper, are answered or refused with a reason, at little cost."""

import gc
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from starlette.exceptions import HTTPException

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import codec as attention_codec
from attention_serving.server.api.attention import named_tensors
from attention_serving.server.api.open_inference import codec as open_inference_codec
from attention_serving.server.api.protobuf_bytes import reader
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.tokenizer import FEW_TEXTS
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.http import embeddings, schemas
from attention_serving.server.http import infer as http_infer
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.server.api.messages import NO_REGIONS, read_attend, read_infer
from tests.server.samples import SELF, TEXT
from tests.support.artifacts import cached_repositories
from tests.support.contradictions import Made, contradicted, good_and_contradicted
from tests.support.mutations import ATTEND, INFER, Good, good_requests, mutated

LIMITS = Limits(max_result_bytes=MIB, max_input_bytes=MIB)
# What 64 KiB may cost. On a quiet machine they take a third of the time.
MAX_MESSAGE, MAX_BYTES, MAX_SECONDS = 64 << 10, 10_000_000, 0.3
JSON_SIZE = "Inference-Header-Content-Length"


def decode(made: Made, models: Callable[[str, str], LoadedModel], limits: Limits = LIMITS) -> None:
    """Reads, decodes and validates a request as the server or the HTTP process does."""
    budget = MemoryBudget(64 * MIB)
    if made.method == "/v1/embeddings":
        embeddings.decode(bytearray(made.data))
        return
    if made.method not in (ATTEND, INFER):
        size, body = (made.headers or {}).get(JSON_SIZE, ""), bytearray(made.data)
        own = min(int(size), len(body)) if size.isdecimal() else len(body)
        budget.reserve(schemas.memory_of(body, own))
        http_infer.decode(body, own, "m", "", 64 * MIB, budget.reserve(0))
        return
    allowance = Allowance(limits, budget.reserve(len(made.data)))
    parsed: Any = (read_attend if made.method == ATTEND else read_infer)(made.data, limits)
    message: typed.AttendRequest | pb.ModelInferRequest = parsed.message
    model = models(message.model_name, message.model_version)
    if isinstance(message, pb.ModelInferRequest):
        request, _ = open_inference_codec.decode(parsed, model, math.inf, allowance, NO_REGIONS)
    elif message.inputs:
        request, _ = named_tensors.decode(parsed, model, math.inf, allowance)
    else:
        names = attention_codec.input_names(model)
        request = attention_codec.decode(parsed, names, math.inf, allowance)
    if not FEW_TEXTS < len(request.texts) <= limits.max_sequences:  # many are encoded on threads of their own
        validate(request, model, limits)


GOOD = good_requests()


@pytest.mark.parametrize("change", [mutated, contradicted])
@pytest.mark.parametrize("index", range(len(GOOD)))
def test_mutated_requests_are_accepted_or_refused_with_a_reason(
    index: int, change: Callable[[Good, random.Random], bytes], loaded: Repository
) -> None:
    rng = random.Random(index)  # noqa: S311 - the same mutations every time
    good, count = GOOD[index], 60
    decode(Made(good.method, good.data), loaded.ready)
    accepted, codes = 0, set[Code]()
    for _ in range(count):
        try:
            decode(Made(good.method, change(good, rng)), loaded.ready)
        except EngineError as error:
            codes.add(error.code)
        except DecodeError:
            pass
        else:
            accepted += 1
    assert accepted < count
    assert Code.INTERNAL not in codes


@pytest.fixture
def cheap() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs a decoder, which may refuse what it is given, and checks what that took."""

    def refused_or_not(decoder: Callable[[], object]) -> None:
        try:
            decoder()
        except (EngineError, HTTPException, DecodeError):
            return

    def check(decoder: Callable[[], object]) -> None:
        seconds = math.inf
        for _ in range(3):  # what is slow by itself is slow each time
            if seconds > MAX_SECONDS:
                started = time.thread_time()
                refused_or_not(decoder)
                seconds = time.thread_time() - started
        assert seconds < MAX_SECONDS
        tracemalloc.start()
        try:
            refused_or_not(decoder)
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
        finally:
            tracemalloc.stop()

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
def test_what_is_huge_on_paper_costs_little(
    made: Made, loaded: Repository, cheap: Callable[[Callable[[], object]], None]
) -> None:
    (folder,) = cached_repositories(SENTENCE_MODELS)
    encoder = load_model(folder / SENTENCE / "1", Device(threads=1))
    assert len(made.data) <= 2 * MAX_MESSAGE
    cheap(lambda: decode(made, lambda name, _: encoder if name == SENTENCE else loaded.ready(name), Limits()))


CONTRADICTED = good_and_contradicted()


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(CONTRADICTED)))
def test_whatever_64_kib_a_caller_sends_they_cost_little(
    index: int, loaded: Repository, cheap: Callable[[Callable[[], object]], None]
) -> None:
    rng = random.Random(index)  # noqa: S311 - the same mutations every time
    good, change = CONTRADICTED[index]
    decode(good, loaded.ready)
    for _ in range(100):
        made = change(rng)
        if len(made.data) <= MAX_MESSAGE:
            cheap(partial(decode, made, loaded.ready, Limits()))


@pytest.mark.parametrize("count", [FEW_TEXTS, FEW_TEXTS + 1])
def test_many_short_texts_are_not_tokenized_on_the_thread_that_takes_calls(count: int) -> None:
    message = pb.ModelInferRequest()
    message.inputs.add(name="text", datatype="BYTES", shape=[count])
    request = typed.AttendRequest(text=typed.TextSequences(texts=["a"] * count))
    streamed = reader(typed.AttendStreamRequest, attention_codec.PATHS, 4096, within="request")
    found = [
        open_inference_codec.is_slow(read_infer(message.SerializeToString())),
        attention_codec.is_slow(read_attend(request.SerializeToString())),
        attention_codec.is_slow(streamed(typed.AttendStreamRequest(request=request).SerializeToString())),
    ]
    assert found == [count > FEW_TEXTS] * 3
