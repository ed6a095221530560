"""Limits of calls, streams, messages and connections of a real server."""

import socket

import grpc
import pytest

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.process import grpc_server
from attention_serving.server.transport import create
from attention_serving.server.transport.completion_queue import ACCEPT_AHEAD
from tests.server.api.served import SERVING, Opened, OpenStream, answer, attend, health, watch
from tests.server.api.test_both_transports import unread
from tests.server.seams import Served, wait_until

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
