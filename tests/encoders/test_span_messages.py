"""Messages with spans: sizes are checked before anything is built, changed messages fail with a reason."""

import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import codec
from attention_serving.server.api.protobuf_bytes import field
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import Code, EngineError, LimitExceededError, OverloadedError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from tests.encoders.repository import SENTENCE
from tests.server.api.messages import allowing, read_attend
from tests.server.seams import engine_of, outcome
from tests.support import encoders
from tests.support.mutations import ATTEND, Good, mutated

LIMITS = Limits(max_input_bytes=4 * MIB)
MANY = 6000
PER_REQUEST = 300


@pytest.fixture(scope="module")
def model(sentence_repository: Path) -> LoadedModel:
    return load_model(sentence_repository / SENTENCE / "1", Device(threads=1))


def request_with(*spans: list[tuple[int, int]], text: str = "eat dessert first") -> pb.AttendRequest:
    message = pb.AttendRequest(model_name=SENTENCE, text=pb.TextSequences(texts=[text] * len(spans)))
    message.embedding.spans.lengths.extend(map(len, spans))
    message.embedding.spans.starts.extend(start for own in spans for start, _ in own)
    message.embedding.spans.ends.extend(end for own in spans for _, end in own)
    return message


def prepare(
    data: bytes, model: LoadedModel, limits: Limits = LIMITS, budget: MemoryBudget | None = None
) -> ValidatedRequest:
    """Reads, decodes and validates a request as the server does."""
    allowance = Allowance(limits, (budget or MemoryBudget(64 * MIB)).reserve(len(data)))
    request = codec.decode(read_attend(data, limits), codec.input_names(model), math.inf, allowance)
    return validate(request, model, limits)


def numbers(number: int, content: bytes) -> bytes:
    """The packed content of a field of the spans of a request."""
    return b"".join(field((12, 2, number), [content]))


def test_numbers_that_are_not_packed_read_the_same() -> None:
    long = request_with([], text="eat " + " " * (32 << 10)).SerializeToString()
    unpacked = [b"\x08\x02", b"\x15\0\0\0\0", b"\x15\1\0\0\0", b"\x1d\3\0\0\0", b"\x1d\2\0\0\0"]
    without_lengths = long.replace(numbers(1, b"\0"), b"")
    data = without_lengths + b"".join(field((12, 2), unpacked))
    request = codec.decode(read_attend(data, LIMITS), {}, math.inf, allowing(LIMITS))
    assert request.spans is not None
    assert (request.spans.rows.tolist(), request.spans.lengths) == ([[0, 3], [1, 2]], (2,))


def after_a_good_request(*content: bytes) -> bytes:
    return b"".join([request_with([(0, 1)]).SerializeToString(), *content])


# Each with the message of its refusal.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "10 M starts": (
        lambda: after_a_good_request(numbers(2, bytes(40 * MIB))),
        "have 10485761 starts; the lengths sum to 1",
    ),
    "10 M ends": (
        lambda: after_a_good_request(numbers(3, bytes(40 * MIB))),
        "have 10485761 ends; the lengths sum to 1",
    ),
    "40 M lengths": (
        lambda: after_a_good_request(numbers(1, b"\1" * (40 * MIB))),
        "contains 41943041 sequences; the limit is 4096",
    ),
    "a length of 4 G": (
        lambda: after_a_good_request(numbers(1, b"\xff\xff\xff\xff\x0f")),
        "have 1 starts; the lengths sum to 4294967296",
    ),
    "300 k spans": (
        lambda: request_with([(0, 1)] * 300_000).SerializeToString(),
        "would have 4800000 bytes decoded; the limit is 4194304",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages_are_refused_before_anything_is_built(model: LoadedModel, case: str) -> None:
    build, message = HOSTILE[case]
    data = build()
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=message) as caught:
            prepare(data, model)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "spans")
    assert peak < 2 * MIB


def test_a_result_that_would_be_too_large_is_refused(model: LoadedModel) -> None:
    data = request_with([(0, 1)] * MANY).SerializeToString()
    with pytest.raises(LimitExceededError, match="the result would be 768000 bytes") as caught:
        prepare(data, model, Limits(max_result_bytes=MIB // 2))
    assert caught.value.field == "spans"


def test_the_memory_of_spans_is_reserved(model: LoadedModel) -> None:
    data = request_with([(0, 1)] * MANY).SerializeToString()
    budget = MemoryBudget(len(data) + 8 * MANY)
    other = budget.reserve(1)
    with pytest.raises(OverloadedError):
        prepare(data, model, budget=budget)
    other.release()
    assert prepare(data, model).form.held_bytes > 2 * MANY * 4 * encoders.WIDTH


@pytest.mark.parametrize("spans", [[(0, 3), (4, 11)], [(0, 1)] * MANY], ids=["few", "many"])
def test_mutated_messages_are_accepted_or_refused_with_a_reason(
    model: LoadedModel, spans: list[tuple[int, int]]
) -> None:
    rng = random.Random(len(spans))  # noqa: S311 - the same mutations every time
    good = Good(ATTEND, request_with(spans, [(0, 2)]).SerializeToString())
    prepare(good.data, model)
    outcomes = {"accepted": 0, "refused": 0, "failed": 0}
    for _ in range(PER_REQUEST):
        try:
            prepare(mutated(good, rng), model)
        except EngineError as error:
            outcomes["refused" if error.code is not Code.INTERNAL else "failed"] += 1
        except DecodeError:
            outcomes["refused"] += 1
        else:
            outcomes["accepted"] += 1
    assert outcomes.pop("failed") == 0
    assert min(outcomes.values()) > 0


def test_a_part_of_a_number_is_refused(model: LoadedModel) -> None:
    data = request_with([(0, 1)], text="eat " + " " * (32 << 10)).SerializeToString() + numbers(2, bytes(3))
    with pytest.raises(EngineError, match="a field of numbers ends within a number"):
        prepare(data, model)


def test_offsets_need_texts(model: LoadedModel) -> None:
    offsets = pb.AttendRequest(token_ids=pb.TokenSequences(lengths=[1], ids=[5]), return_offsets=True)
    with pytest.raises(EngineError, match="needs text; the request has none"):
        prepare(offsets.SerializeToString(), model)


def test_the_thread_that_takes_calls_does_not_pool(model: LoadedModel) -> None:
    with_spans = prepare(request_with([(0, 3)]).SerializeToString(), model)
    message = request_with([])
    message.embedding.ClearField("spans")
    without = prepare(message.SerializeToString(), model)
    engine = engine_of(Limits(), parallel_runs=1)
    try:
        for request, runs_here in ((with_spans, False), (without, True)):
            engine.submit(request, wake=False)
            assert engine.run_inline(math.inf) is runs_here
            (embedding,) = outcome(request).outputs[EMBEDDING]
            assert embedding.shape[-1] == encoders.WIDTH
    finally:
        engine.close()
