"""An answered request is freed at once, without the garbage collector."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array
from tests.server.api.messages import attend_request
from tests.server.seams import PATIENCE_SECONDS, Served, tapped


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Inputs:
    """A tap that keeps weak references to the inputs of every run."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []

    def __call__(self, inputs: dict[str, Array]) -> None:
        self.seen.append(weakref.ref(inputs["query"]))

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


def ask(stub: AttentionServiceStub, streamed: int) -> None:
    """Makes one unary call and one stream."""
    stub.Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
    requests = [pb.AttendStreamRequest(request=attend_request([3])) for _ in range(streamed)]
    assert len(list(stub.AttendStream(iter(requests), timeout=PATIENCE_SECONDS))) == streamed


@pytest.mark.usefixtures("no_collector")
def test_answered_requests_are_freed_without_the_garbage_collector(self_model: LoadedModel) -> None:
    inputs = Inputs()
    with Served(tapped(self_model, inputs)) as served:
        stub = AttentionServiceStub(served.channel)
        for _ in range(20):
            ask(stub, streamed=3)
        # The thread of the last run may not have released its inputs yet.
        assert len(inputs.seen) >= 40
        assert inputs.alive <= 1
