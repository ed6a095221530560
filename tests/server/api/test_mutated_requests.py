"""Requests that are almost right are accepted, or refused with a reason: nothing fails unexpectedly."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import codec as attention_codec
from attention_serving.server.api.attention import named_tensors
from attention_serving.server.api.open_inference import codec as open_inference_codec
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validation import validate
from tests.server.api.messages import read_attend, read_infer
from tests.support.contradictions import contradicted
from tests.support.mutations import ATTEND, Good, good_requests, mutated

LIMITS = Limits(max_result_bytes=MIB, max_input_bytes=MIB)
PER_REQUEST = 60


def prepare(good: Good, data: bytes, models: Repository) -> None:
    """Reads, decodes and validates a request as the server does."""
    budget = MemoryBudget(64 * MIB)
    allowance = Allowance(LIMITS, budget.reserve(len(data)))
    parsed: Any = (read_attend if good.method == ATTEND else read_infer)(data, LIMITS)
    message: typed.AttendRequest | pb.ModelInferRequest = parsed.message
    model = models.ready(message.model_name, message.model_version)
    if isinstance(message, typed.AttendRequest) and message.inputs:
        request, _ = named_tensors.decode(parsed, model, math.inf, allowance)
    elif isinstance(message, typed.AttendRequest):
        names = attention_codec.input_names(model)
        request = attention_codec.decode(parsed, names, math.inf, allowance)
    else:
        request, _ = open_inference_codec.decode(parsed, model, math.inf, allowance)
    validate(request, model, LIMITS)


GOOD = good_requests()


@pytest.mark.parametrize("change", [mutated, contradicted])
@pytest.mark.parametrize("index", range(len(GOOD)))
def test_mutated_requests_are_accepted_or_refused_with_a_reason(
    index: int, change: Callable[[Good, random.Random], bytes], loaded: Repository
) -> None:
    rng = random.Random(index)  # noqa: S311 - the same mutations every time
    good = GOOD[index]
    prepare(good, good.data, loaded)
    accepted, codes = 0, set[Code]()
    for _ in range(PER_REQUEST):
        try:
            prepare(good, change(good, rng), loaded)
        except EngineError as error:
            codes.add(error.code)
        except DecodeError:
            pass
        else:
            accepted += 1
    assert accepted < PER_REQUEST
    assert Code.INTERNAL not in codes
