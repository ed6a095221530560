"""The first answer of a stream is sent, however busy the machine and the engine are."""

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Device
from tests.server.api.messages import attend_request
from tests.server.api.test_admission import attend_on
from tests.server.samples import SELF, load_repository
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.transport.test_first_message import (
    test_the_second_message_follows_a_first_that_announced_it as send_two,
)

pytestmark = pytest.mark.chaos

ROUNDS = 500
STREAMS, AT_A_TIME = 1000, 50
BUSY_LOOPS = 2
# Sequences of one request, whose weights fill most of the largest message.
HEAVY = [160] * 4


def _spin() -> None:
    while True:
        pass


@pytest.fixture
def model(artifacts: Path) -> LoadedModel:
    return load_repository(artifacts, Device(threads=1)).ready(SELF)


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """As many busy loops as a small machine has cores."""
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=_spin, daemon=True) for _ in range(BUSY_LOOPS)]
    for loop in loops:
        loop.start()
    yield
    for loop in loops:
        loop.kill()
        loop.join()


@pytest.mark.usefixtures("busy_machine")
def test_every_first_message_is_sent_beside_busy_loops() -> None:
    for _ in range(ROUNDS):
        send_two()


@pytest.mark.usefixtures("busy_machine")
def test_every_stream_ends_beside_heavy_runs(model: LoadedModel) -> None:
    ended = threading.Event()

    def compute(served: Served) -> None:
        with served.connect() as channel:
            while not ended.is_set():
                AttentionServiceStub(channel).Attend(
                    attend_request(HEAVY, return_weights=True), timeout=PATIENCE_SECONDS
                )

    options: dict[str, Any] = {"max_concurrent_calls": 256, "max_streams": 128}
    with Served(model, **options) as served:
        heavy = threading.Thread(target=compute, args=(served,))
        heavy.start()
        stub = AttentionServiceStub(served.channel)
        requests = [pb.AttendStreamRequest(id=str(n), request=attend_request([2])) for n in range(3)]
        for _ in range(STREAMS // AT_A_TIME):
            streams = [stub.AttendStream(iter(requests), timeout=PATIENCE_SECONDS) for _ in range(AT_A_TIME)]
            assert [[answer.id for answer in stream] for stream in streams] == [["0", "1", "2"]] * AT_A_TIME
            assert {stream.code() for stream in streams} == {grpc.StatusCode.OK}
        ended.set()
        heavy.join()
        assert attend_on(served.channel) == [2]
