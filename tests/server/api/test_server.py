"""A server from its addresses to its drain, and its limits of calls, streams and connections."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb
from grpc_reflection.v1alpha import reflection_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.methods import REFLECTION, SERVICES
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.errors import ServerError
from attention_serving.server.process import grpc_server
from attention_serving.server.process.grpc_server import GrpcServer
from attention_serving.server.transport import create
from attention_serving.server.transport.completion_queue import ACCEPT_AHEAD
from tests.server.api.served import (
    NOT_SERVING,
    SERVING,
    Opened,
    OpenStream,
    Stopping,
    answer,
    attend,
    health,
    refusal,
    watch,
)
from tests.server.api.test_both_transports import unread
from tests.server.samples import SELF
from tests.server.seams import PATIENCE_SECONDS, Calls, Served, settings_of, wait_until

OPTIONS = settings_of()


def test_the_health_of_an_unknown_service_is_unknown(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        for known in ("", *SERVICES, SELF):
            assert health(served.channel, known) == SERVING
        assert health(served.channel, "nobody") is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services_and_describes_their_files(self_model: LoadedModel) -> None:
    asked = [
        reflection_pb.ServerReflectionRequest(list_services=""),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
    ]
    with Served(self_model) as served:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", REFLECTION}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in a folder whose name is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "socket"


def test_a_socket_answers_as_the_port_does(path: Path, self_model: LoadedModel) -> None:
    options: dict[str, Any] = {"unix_socket": path, "max_concurrent_calls": 20}
    with Served(self_model, **options) as served, grpc.insecure_channel(f"unix:{path}") as own:
        first, second = [attend(channel, 3).result() for channel in (served.channel, own)]
        assert first == second
        assert served.server.load().open_connections == 2
        second = GrpcServer(settings_of(unix_socket=path), Calls())
        with pytest.raises(ServerError, match=f"{path}: another process does"):
            second.bind()
        second.stop(0)
        calls = [attend(own, rows) for rows in range(1, 20)]
        assert calls[0].result().context_vectors.lengths == [1]
        served.server.stop(PATIENCE_SECONDS)
        assert list(path.parent.iterdir()) == []
        assert {call.code() for call in calls} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("name", ["%41", "#?", "a:b c", "[*]", "ä"])
def test_a_path_may_have_characters_that_addresses_of_grpc_escape(
    path: Path, name: str, self_model: LoadedModel
) -> None:
    path = path.with_name(name)
    with (
        Served(self_model, unix_socket=path) as served,
        grpc.insecure_channel(f"unix:{quote(str(path))}") as channel,
    ):
        assert attend(channel, 3).result().context_vectors.lengths == [3]
        assert served.server.load().open_connections == 1


def test_a_path_that_cannot_be_used_is_refused(path: Path) -> None:
    path.write_text("kept")
    long = path.parent / ("s" * 107)
    for other, reason in (
        (path, "another process does, or it is another kind of file"),
        (path / "socket", "Not a directory"),
        (path.parent / "missing/socket", "No such file or directory"),
        (long, f"its path has {len(str(long))} bytes; the limit of a socket's path is 107"),
        (path.parent / "a,b", "gRPC's clients take the comma for the end of the path"),
    ):
        server = GrpcServer(settings_of(unix_socket=other), Calls())
        with pytest.raises(ServerError, match=f"cannot listen on {other}: {reason}"):
            server.bind()
        server.stop(0)
    assert path.read_text() == "kept"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_a_server_that_stops_before_its_start_fails_the_calls_that_wait() -> None:
    server = GrpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        call = attend(channel)
        server.stop(PATIENCE_SECONDS)
        assert call.code() is UNAVAILABLE


def test_a_drain_answers_what_was_accepted_and_refuses_the_rest(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        held, stream = attend(served.channel), OpenStream(served.channel)
        for name in ("a", "b"):
            stream.send(name)
        assert served.engine.has_queued(3)
        with served.connect() as other:
            assert health(other) == SERVING
            stopping = Stopping(served)
            while health(other) is not UNAVAILABLE:  # a connection without an open call is closed
                pass
        assert refusal(attend(served.channel)) == (UNAVAILABLE, "SHUTTING_DOWN")
        assert health(served.channel) == NOT_SERVING
        assert stopping.goes_on
        served.gate.open()
        assert held.result(PATIENCE_SECONDS).context_vectors.lengths == [2]
        assert [next(stream.replies).id, next(stream.replies).id] == ["a", "b"]
        assert refusal(stream.replies) == (UNAVAILABLE, "SHUTTING_DOWN")
        stopping.wait()
        stream.end()


def test_calls_that_outlast_the_grace_end_with_unavailable(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        calls, stream = [attend(served.channel)], OpenStream(served.channel)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        calls.append(attend(served.channel, 3))
        for _ in range(2):
            stream.send()
        assert served.engine.has_queued(4)
        Stopping(served, 0).wait()
        assert {call.code() for call in (*calls, stream.replies)} == {UNAVAILABLE}
        assert served.calls.ended(3) == {("Attend", "UNAVAILABLE"): 2, ("AttendStream", "UNAVAILABLE"): 1}
        stream.end()
    assert [run.rows for run in served.engine.recorder.runs] == [2]


EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PLACES, FLOOD = 8, 5 * ACCEPT_AHEAD
# What a client of HTTP/2 begins with: the preface, and a frame of settings without settings.
CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


def test_calls_without_a_message_take_no_place_and_are_bounded(self_model: LoadedModel) -> None:
    with (
        Served(self_model, max_concurrent_calls=1, max_waiting_calls=4) as served,
        served.connect() as other,
    ):
        opened = Opened(served, 3), Opened(served, 1)
        wait_until(lambda: served.server.load().waiting_calls == 4)
        assert attend(other).code() is EXHAUSTED
        assert health(other) == SERVING
        opened[1].close()
        wait_until(lambda: served.server.load().waiting_calls == 3)
        assert answer(attend(other)) == [2]
        opened[0].close()
    assert served.calls.refusals == ["OVERLOADED"]


def test_every_call_of_a_flood_is_answered_or_refused_and_counted_once(self_model: LoadedModel) -> None:
    with Served.held(self_model, max_concurrent_calls=PLACES, max_streams=1) as served:
        stream, second = OpenStream(served.channel), OpenStream(served.channel)
        stream.send()
        assert served.engine.has_queued(1)
        second.send()
        assert second.replies.code() is EXHAUSTED
        calls = [attend(served.channel) for _ in range(FLOOD)]
        refused, answered = FLOOD - PLACES + 1, PLACES - 1
        expected = {("AttendStream", "RESOURCE_EXHAUSTED"): 1, ("Attend", "RESOURCE_EXHAUSTED"): refused}
        assert served.calls.ended(1 + refused) == expected
        served.gate.open()
        codes = [call.code() for call in calls]
        assert (codes.count(grpc.StatusCode.OK), codes.count(EXHAUSTED)) == (answered, refused)
        for each in (stream, second):
            each.end()
        assert len(list(stream.replies)) == 1


def test_calls_that_infer_nothing_are_bounded_among_themselves(self_model: LoadedModel) -> None:
    with Served(self_model, max_waiting_calls=3) as served:
        watching = [watch(served.channel) for _ in range(3)]
        for news in watching:
            next(news)
        assert health(served.channel) is EXHAUSTED
        assert answer(attend(served.channel)) == [2]
        for news in watching:
            news.cancel()


def test_connections_beyond_the_limit_are_closed(self_model: LoadedModel) -> None:
    with Served(self_model, max_connections=2) as served, served.connect() as other:
        for channel in (served.channel, other):
            assert answer(attend(channel)) == [2]
        assert served.server.load().open_connections == 2
        with served.connect() as third:
            assert attend(third).code() is grpc.StatusCode.UNAVAILABLE


def test_an_idle_connection_is_closed(self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "COUNT_SECONDS", 0.0)
    with Served(self_model, connection_idle_seconds=0.2) as served:
        assert answer(attend(served.channel)) == [2]
        wait_until(lambda: not served.server.load().open_connections)


@pytest.mark.thorough
def test_a_client_without_pings_is_cut_off(self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's own timeout of pings is a minute."""
    monkeypatch.setattr(create, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    with (
        Served(self_model, keepalive_seconds=1) as served,
        socket.create_connection(served.address, timeout=30) as frozen,
    ):
        frozen.sendall(CLIENT_PREFACE)
        while frozen.recv(1024):
            pass


def test_a_reply_that_is_not_read_keeps_its_place_until_it_is(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=2, message_timeout_seconds=0) as served:
        calls = [unread(served) for _ in range(2)]
        assert served.engine.has_queued(2)
        with served.connect() as other:
            assert attend(other).code() is EXHAUSTED
            for call in calls:
                assert len(list(call)) == 1
            wait_until(lambda: served.server.load().open_calls == 0)
            assert answer(attend(other)) == [2]
        assert served.calls.ended(4) == {("Attend", "OK"): 3, ("Attend", "RESOURCE_EXHAUSTED"): 1}
        assert "SLOW_READER" not in served.calls.refusals
