"""A server: its addresses and its life from `bind` over `start` to `stop`, and what it says of itself."""

import dataclasses
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as oip
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.api.methods import REFLECTION, REFLECTION_V1, REFLECTIONS, SERVICES
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.errors import BindError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.settings import HEADER_BYTES
from attention_serving.server.transport import options
from tests.server.api.messages import attend_request
from tests.server.api.stopping import OPTIONS, Stopping, watch
from tests.server.samples import HEADS, SELF, TEXT
from tests.server.seams import PATIENCE_SECONDS, Calls, Served

# What a client of HTTP/2 begins with: the preface, and a frame of settings without settings.
CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as found:
            found.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture
def waiting() -> Iterator[tuple[RpcServer, Any]]:
    """A server that is bound, and a call that waits for its start."""
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        yield (
            server,
            AttentionServiceStub(channel).Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS),
        )
    server.stop(PATIENCE_SECONDS)


def test_calls_before_the_start_wait_for_it(waiting: tuple[RpcServer, Any], self_model: LoadedModel) -> None:
    server, call = waiting
    engine = Engine(Repository([self_model]))
    server.start(engine)
    assert list(call.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
    server.stop(PATIENCE_SECONDS)
    engine.close()


def test_a_server_that_stops_before_its_start_fails_the_calls_that_wait(
    waiting: tuple[RpcServer, Any],
) -> None:
    server, call = waiting
    server.stop(PATIENCE_SECONDS)
    assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_calls_that_outlast_the_grace_end_with_unavailable(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        waits = stub.Attend.future(attend_request([3]), timeout=PATIENCE_SECONDS)
        opened = stub.AttendStream(iter([pb.AttendStreamRequest(request=attend_request([2]))] * 2))
        assert served.engine.has_queued(4)
        Stopping(served, 0).wait()
        for call in (held, waits, opened):
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        ended = served.calls.ended(3)
        assert ended == {("Attend", "UNAVAILABLE"): 2, ("AttendStream", "UNAVAILABLE"): 1}
    assert [run.tokens for run in served.engine.recorder.runs] == [2]


def test_a_port_in_use_is_refused() -> None:
    first = RpcServer(OPTIONS, Calls())
    port = first.bind()
    second = RpcServer(dataclasses.replace(OPTIONS, port=port), Calls())
    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}"):
        second.bind()
    second.stop(0)
    first.stop(0)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_server_listens_on_ipv6() -> None:
    server = RpcServer(dataclasses.replace(OPTIONS, host="[::1]"), Calls())
    try:
        assert server.bind() > 0
    finally:
        server.stop(0)


@pytest.mark.thorough
def test_a_client_that_answers_no_ping_is_disconnected(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's own timeout of pings is a minute."""
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    with (
        Served(self_model, keepalive_seconds=1) as served,
        socket.create_connection(served.address, timeout=30) as frozen,
    ):
        frozen.sendall(CLIENT_PREFACE)
        while frozen.recv(1024):
            pass


def test_the_largest_result_can_be_sent(self_model: LoadedModel) -> None:
    most = (1 << 20) - HEADER_BYTES
    long = 340  # with weights HEADS * long**2 floats and context vectors of 4
    left = most - 4 * (HEADS * long**2 + 4 * long)
    message = attend_request([long, *[1] * (left // (4 * (HEADS + 4)))], return_weights=True)
    any_size = [("grpc.max_receive_message_length", -1)]
    with (
        Served(self_model, limits=Limits(max_result_bytes=most)) as served,
        grpc.insecure_channel(served.target, any_size) as channel,
    ):
        answer = AttentionServiceStub(channel).Attend(message, timeout=PATIENCE_SECONDS)
    assert most - 1000 < len(answer.attention_weights.data) + len(answer.context_vectors.data) <= most


def test_the_health_of_an_unknown_service_is_unknown(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        for known in ("", *SERVICES, SELF):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=known), timeout=PATIENCE_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        news = watch(served, "nobody")
        assert next(news).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        news.cancel()


@pytest.mark.parametrize("service", [REFLECTION, REFLECTION_V1], ids=["v1alpha", "v1"])
def test_reflection_lists_the_services_and_describes_their_files(
    self_model: LoadedModel, service: str
) -> None:
    asked = [
        reflection_pb.ServerReflectionRequest(list_services=""),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
        reflection_pb.ServerReflectionRequest(file_containing_symbol="nobody"),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=service),
    ]
    with Served(self_model) as served:
        method: Any = served.channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            reflection_pb.ServerReflectionRequest.SerializeToString,
            reflection_pb.ServerReflectionResponse.FromString,
        )
        listed, described, unknown, itself = method(iter(asked), timeout=PATIENCE_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", *REFLECTIONS}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    (content,) = itself.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(content)
    assert f"{file.package}.{file.service[0].name}" == service


def test_a_configuration_names_the_tensors_of_a_model(
    self_model: LoadedModel, text_model: LoadedModel
) -> None:
    """The batch axis is not part of the shape, unless there is no other."""
    expected = [
        (SELF, Limits().max_sequences, ("query", oip.TYPE_FP32, [-1, 4])),
        (TEXT, 0, ("text", oip.TYPE_STRING, [-1])),
    ]
    with Served(self_model, text_model) as served:
        stub = GRPCInferenceServiceStub(served.channel)
        for name, max_batch_size, sent in expected:
            config = stub.ModelConfig(oip.ModelConfigRequest(name=name), timeout=PATIENCE_SECONDS).config
            assert (config.name, config.max_batch_size) == (name, max_batch_size)
            assert config.HasField("dynamic_batching") == (max_batch_size > 0)
            (tensor,) = config.input
            assert (tensor.name, tensor.data_type, list(tensor.dims)) == sent
            assert config.output[0].name == "context_vectors"
