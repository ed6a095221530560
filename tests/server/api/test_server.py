"""Where a server listens, and what it says of itself: health, reflection, configurations of models."""

import dataclasses
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2 as oip
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.api.methods import REFLECTION, REFLECTION_V1, SERVICES
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.errors import BindError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.transport import options
from attention_serving.server.transport.options import MAX_PATH_BYTES, UnixSocket
from tests.server.api.served import OPTIONS, SERVING, answer, attend, health, watch
from tests.server.samples import SELF, TEXT
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


def test_the_health_of_an_unknown_service_is_unknown(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        for known in ("", *SERVICES, SELF):
            assert health(served.channel, known) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health(served.channel, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        news = watch(served.channel, "nobody")
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
    ]
    with Served(self_model) as served:
        method: Any = served.channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            reflection_pb.ServerReflectionRequest.SerializeToString,
            reflection_pb.ServerReflectionResponse.FromString,
        )
        listed, described, unknown = method(iter(asked), timeout=PATIENCE_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", REFLECTION}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_the_batch_axis_of_texts_is_part_of_their_shape(text_model: LoadedModel) -> None:
    """They have no other. That of other models is not: tests/end_to_end/test_tritonclient.py."""
    with Served(text_model) as served:
        stub, asked = GRPCInferenceServiceStub(served.channel), oip.ModelConfigRequest(name=TEXT)
        config = stub.ModelConfig(asked, timeout=PATIENCE_SECONDS).config
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    (tensor,) = config.input
    assert (tensor.name, tensor.data_type, list(tensor.dims)) == ("text", oip.TYPE_STRING, [-1])
    assert [output.name for output in config.output] == ["context_vectors", "lengths"]


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in a folder whose name is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "socket"


class OnSocket:
    """A server on a port and a Unix domain socket."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.server = RpcServer(dataclasses.replace(OPTIONS, unix_socket=path), Calls())
        targets = [f"unix:{path}", f"{OPTIONS.host}:{self.server.bind()}"]
        self.channels = [grpc.insecure_channel(target) for target in targets]
        self.server.start(engine)

    def stop(self) -> None:
        self.server.stop(PATIENCE_SECONDS)
        for channel in self.channels:
            channel.close()


@pytest.fixture
def engine(self_model: LoadedModel) -> Iterator[Engine]:
    with closing(Engine(Repository([self_model]))) as engine:
        yield engine


def test_a_socket_answers_as_the_port_does_and_its_calls_outlast_a_drain(path: Path, engine: Engine) -> None:
    serving = OnSocket(path, engine)
    first, second = [attend(channel, 3).result() for channel in serving.channels]
    assert first == second
    assert serving.server.load().connections == 2
    second = RpcServer(dataclasses.replace(OPTIONS, unix_socket=path), Calls())
    with pytest.raises(BindError, match=f"{path}: another process listens on it"):
        second.bind()
    second.stop(0)
    calls = [attend(serving.channels[0], rows) for rows in range(1, 20)]
    assert answer(calls[0]) == [1]
    serving.server.stop(PATIENCE_SECONDS)
    assert {call.code() for call in calls} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert attend(serving.channels[0]).code() is grpc.StatusCode.UNAVAILABLE
    serving.stop()


def test_a_later_server_keeps_its_socket_when_the_earlier_one_ends(path: Path, engine: Engine) -> None:
    earlier = OnSocket(path, engine)
    path.unlink()
    later = OnSocket(path, engine)
    earlier.stop()
    assert list(path.parent.iterdir()) == [path]
    assert answer(attend(later.channels[0])) == [2]
    later.stop()
    assert list(path.parent.iterdir()) == []


def test_a_path_that_cannot_be_used_is_refused(path: Path) -> None:
    path.write_text("kept")
    long = path.parent / ("s" * (MAX_PATH_BYTES - len(str(path.parent))))
    for other, says in (
        (path, "there is a file that is not a socket"),
        (path / "socket", "the folder does not exist"),
        (long, "the path is longer than"),
    ):
        with pytest.raises(BindError, match=says):
            UnixSocket(other).prepare()
    assert path.read_text() == "kept"
