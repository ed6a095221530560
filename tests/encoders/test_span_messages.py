"""Messages with spans: sizes are checked before anything is built, changed messages fail with a reason."""

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import codec
from attention_serving.server.api.protobuf_bytes import field
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import Code, EngineError, OverloadedError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from tests.encoders.repository import SENTENCE
from tests.server.api.messages import read_attend
from tests.support import encoders

LIMITS = Limits(max_input_bytes=4 * MIB)
MANY = 6000


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


def with_numbers(number: int, content: bytes) -> bytes:
    """A good request, and the packed content of a further field of its spans."""
    return b"".join([request_with([(0, 1)]).SerializeToString(), *field((12, 2, number), [content])])


# Each with the message of its refusal.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "10 M starts": (lambda: with_numbers(2, bytes(40 * MIB)), "have 10485761 starts; the lengths sum to 1"),
    "40 M lengths": (lambda: with_numbers(1, b"\1" * (40 * MIB)), "contains 41943041 sequences; the limit"),
    "a length of 4 G": (lambda: with_numbers(1, b"\xff\xff\xff\xff\x0f"), "the lengths sum to 4294967296"),
    "300 k spans": (
        lambda: request_with([(0, 1)] * 300_000).SerializeToString(),
        "would have 4800000 bytes decoded; the limit is 4194304",
    ),
}


@pytest.mark.parametrize(("build", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused_before_anything_is_built(
    model: LoadedModel, build: Callable[[], bytes], message: str
) -> None:
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


def test_the_memory_of_spans_is_reserved(model: LoadedModel) -> None:
    data = request_with([(0, 1)] * MANY).SerializeToString()
    budget = MemoryBudget(len(data) + 8 * MANY)
    other = budget.reserve(1)
    with pytest.raises(OverloadedError):
        prepare(data, model, budget=budget)
    other.release()
    assert prepare(data, model).form.held_bytes > 2 * MANY * 4 * encoders.WIDTH
