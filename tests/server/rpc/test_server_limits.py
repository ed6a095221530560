"""What a server still does when it holds as many calls, or answers as large, as it may."""

import dataclasses
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.attention.v1 import attention_pb2 as pb
from protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from server.engine.engine import Engine
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.repository import Repository
from server.metrics import Metrics
from server.rpc.server import RpcOptions, RpcServer
from server.settings import HEADER_BYTES
from tests.server.samples import HEADS, SELF
from tests.server.seams import PATIENCE_SECONDS, Gate, tapped

MAX_BYTES = 1 << 20
RESULT_BYTES = MAX_BYTES - HEADER_BYTES
OPTIONS = RpcOptions(
    host="127.0.0.1",
    port=0,
    max_message_bytes=MAX_BYTES,
    max_concurrent_calls=1,
    max_streams=1,
    stream_window=1,
)
ANY_SIZE = [("grpc.max_receive_message_length", -1)]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def channel(self_model: LoadedModel, gate: Gate) -> Iterator[grpc.Channel]:
    """To a server that takes one call at a time and holds its run until the gate is opened."""
    limits = Limits(max_result_bytes=RESULT_BYTES)
    # Not on the thread that takes calls, or the gate would hold those too.
    engine = Engine(Repository([tapped(self_model, gate)]), limits, inline_seconds=0)
    server = RpcServer(OPTIONS, Metrics())
    port = server.bind()
    server.start(engine)
    with grpc.insecure_channel(f"{OPTIONS.host}:{port}", ANY_SIZE) as channel:
        yield channel
    gate.open()
    server.stop(PATIENCE_SECONDS)
    engine.close()


def request(lengths: list[int], *, return_weights: bool = False) -> pb.AttendRequest:
    """Sequences of zeros."""
    query = pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32,
        width=4,
        lengths=lengths,
        data=np.zeros((sum(lengths), 4), np.float32).tobytes(),
    )
    return pb.AttendRequest(model_name=SELF, query=query, return_weights=return_weights)


def test_a_call_beyond_those_held_is_refused_at_once(channel: grpc.Channel, gate: Gate) -> None:
    stub = AttentionServiceStub(channel)
    held = stub.Attend.future(request([2]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Attend(request([2]), timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.open()
    assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]


def test_a_server_that_is_busy_is_still_healthy(channel: grpc.Channel, gate: Gate) -> None:
    held = AttentionServiceStub(channel).Attend.future(request([2]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    try:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        gate.open()
        held.result(PATIENCE_SECONDS)


def test_what_the_limit_of_results_allows_can_be_sent(channel: grpc.Channel, gate: Gate) -> None:
    gate.open()
    long = 340  # with weights HEADS * long**2 floats and context vectors of 4
    left = RESULT_BYTES - 4 * (HEADS * long**2 + 4 * long)
    lengths = [long, *[1] * (left // (4 * (HEADS + 4)))]
    message = request(lengths, return_weights=True)
    answer = AttentionServiceStub(channel).Attend(message, timeout=PATIENCE_SECONDS)
    assert len(answer.attention_weights.data) + len(answer.context_vectors.data) <= RESULT_BYTES


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as found:
            found.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize(
    "host",
    [
        "::1",
        "[::1]",
    ],
)
def test_a_server_listens_on_ipv6(self_model: LoadedModel, host: str) -> None:
    engine = Engine(Repository([self_model]))
    server = RpcServer(dataclasses.replace(OPTIONS, host=host), Metrics())
    try:
        assert server.bind() > 0
        server.start(engine)
    finally:
        server.stop(0)
        engine.close()
