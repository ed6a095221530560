"""The limits of a server: calls, sizes of results, addresses."""

import dataclasses
import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings import HEADER_BYTES
from attention_serving.server.transport import options
from attention_serving.server.transport.options import RpcOptions
from tests.server.api.messages import attend_request
from tests.server.samples import HEADS
from tests.server.seams import PATIENCE_SECONDS, Gate, WatchedEngine, tapped

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
# What a client of HTTP/2 begins with: the preface, and a frame of settings without settings.
CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def channel(self_model: LoadedModel, gate: Gate) -> Iterator[grpc.Channel]:
    """Connects to a server with a limit of one call, whose runs wait for the gate."""
    limits = Limits(max_result_bytes=RESULT_BYTES)
    # Runs on the transport's thread would block all calls at the gate.
    engine = WatchedEngine([tapped(self_model, gate)], limits)
    server = RpcServer(OPTIONS, Metrics())
    port = server.bind()
    server.start(engine)
    with grpc.insecure_channel(f"{OPTIONS.host}:{port}", ANY_SIZE) as channel:
        yield channel
    gate.open()
    server.stop(PATIENCE_SECONDS)
    engine.close()


def test_a_call_beyond_the_limit_is_refused_at_once(channel: grpc.Channel, gate: Gate) -> None:
    stub = AttentionServiceStub(channel)
    held = stub.Attend.future(attend_request([2]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.open()
    assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]


def test_a_busy_server_is_healthy(channel: grpc.Channel, gate: Gate) -> None:
    held = AttentionServiceStub(channel).Attend.future(attend_request([2]))
    assert gate.entered.wait(PATIENCE_SECONDS)
    try:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        gate.open()
        held.result(PATIENCE_SECONDS)


def test_a_result_within_the_limit_can_be_sent(channel: grpc.Channel, gate: Gate) -> None:
    gate.open()
    long = 340  # with weights HEADS * long**2 floats and context vectors of 4
    left = RESULT_BYTES - 4 * (HEADS * long**2 + 4 * long)
    lengths = [long, *[1] * (left // (4 * (HEADS + 4)))]
    message = attend_request(lengths, return_weights=True)
    answer = AttentionServiceStub(channel).Attend(message, timeout=PATIENCE_SECONDS)
    assert len(answer.attention_weights.data) + len(answer.context_vectors.data) <= RESULT_BYTES


def test_a_client_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    server = RpcServer(dataclasses.replace(OPTIONS, keepalive_seconds=1), Metrics())
    port = server.bind()
    engine = Engine(Repository([]), Limits())
    server.start(engine)
    # gRPC's own timeout of pings is a minute.
    with socket.create_connection((OPTIONS.host, port), timeout=30) as frozen:
        frozen.sendall(CLIENT_PREFACE)
        while frozen.recv(1024):
            pass
    server.stop(0)
    engine.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as found:
            found.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_server_listens_on_ipv6(host: str) -> None:
    server = RpcServer(dataclasses.replace(OPTIONS, host=host), Metrics())
    try:
        assert server.bind() > 0
    finally:
        server.stop(0)
