"""The life of a server from `bind` over `start` to `stop`: what was accepted is answered."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.grpc_server import RpcServer
from tests.server.api.served import (
    NOT_SERVING,
    OPTIONS,
    SERVING,
    OpenStream,
    Stopping,
    answer,
    attend,
    health,
    refusal,
)
from tests.server.seams import PATIENCE_SECONDS, Calls, Served

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def waiting() -> Iterator[tuple[RpcServer, Any]]:
    """A server that is bound, and a call that waits for its start."""
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        yield server, attend(channel)
    server.stop(PATIENCE_SECONDS)


def test_calls_before_the_start_wait_for_it(waiting: tuple[RpcServer, Any], self_model: LoadedModel) -> None:
    server, call = waiting
    engine = Engine(Repository([self_model]))
    server.start(engine)
    assert answer(call) == [2]
    server.stop(PATIENCE_SECONDS)
    engine.close()


def test_a_server_that_stops_before_its_start_fails_the_calls_that_wait(
    waiting: tuple[RpcServer, Any],
) -> None:
    server, call = waiting
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
            while health(other) is not None:  # a connection without an open call is closed
                pass
        assert refusal(attend(served.channel)) == (UNAVAILABLE, "SHUTTING_DOWN")
        assert health(served.channel) == NOT_SERVING
        assert stopping.goes_on
        served.gate.open()
        assert answer(held) == [2]
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
    assert [run.tokens for run in served.engine.recorder.runs] == [2]
