"""Identities while they are used: tokens that are revoked, and what one identity may hold."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from attention_client.errors import from_rpc_error

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.guard import Guard
from tests.server.api.messages import attend_request
from tests.server.api.secured import ATTEND, ENTRIES, UNAUTHENTICATED, Secured, bearer, headers_only
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import eventually, write_tokens


class Conversation:
    """A stream whose next request the test sends when it has seen the reply to the last."""

    def __init__(self, served: Served, token: str) -> None:
        self._go = threading.Semaphore(0)
        self._ended = False
        stub = AttentionServiceStub(served.channel)
        self._replies = stub.AttendStream(self._requests(), metadata=bearer(token), timeout=PATIENCE_SECONDS)

    def _requests(self) -> Iterator[pb.AttendStreamRequest]:
        while self._go.acquire(timeout=PATIENCE_SECONDS) and not self._ended:
            yield pb.AttendStreamRequest(id="7", request=attend_request([2]))

    def ask(self) -> pb.AttendStreamResponse:
        self._go.release()
        reply: pb.AttendStreamResponse = next(self._replies)
        return reply

    def end(self) -> None:
        self._ended = True
        self._go.release()


def test_a_token_that_is_revoked_ends_its_streams_with_the_next_message(secured: Secured) -> None:
    conversation = Conversation(secured.served, "caller-token")
    assert conversation.ask().id == "7"
    write_tokens(secured.file, *(known for known in ENTRIES if known["name"] != "caller"))
    stub = AttentionServiceStub(secured.served.channel)

    def is_revoked() -> bool:
        try:
            stub.Attend(attend_request([2]), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return error.code() is UNAUTHENTICATED
        return False

    assert eventually(is_revoked)
    with pytest.raises(grpc.RpcError) as raised:
        conversation.ask()
    conversation.end()
    assert (raised.value.code(), from_rpc_error(raised.value).reason) == (UNAUTHENTICATED, "TOKEN_INVALID")


def test_a_call_that_was_accepted_ends_although_its_token_is_revoked(
    self_model: LoadedModel, guard: Guard, tokens_file: Path
) -> None:
    with Served.held(self_model, guard=guard) as served:
        stub = AttentionServiceStub(served.channel)
        call = stub.Attend.future(
            attend_request([2]), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS
        )
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        write_tokens(tokens_file)

        def is_revoked() -> bool:
            # A call that is still accepted waits for its message.
            code, _ = headers_only(served, ATTEND, *bearer("caller-token"), timeout=0.5)
            return code is UNAUTHENTICATED

        assert eventually(is_revoked)
        served.gate.open()
        assert list(call.result().context_vectors.lengths) == [2]


def test_an_identity_at_its_limit_is_refused_and_others_are_not(
    self_model: LoadedModel, guard: Guard
) -> None:
    with Served.held(self_model, guard=guard) as served:
        stub = AttentionServiceStub(served.channel)

        def start(token: str) -> Any:
            return stub.Attend.future(attend_request([2]), metadata=bearer(token), timeout=PATIENCE_SECONDS)

        held = start("limited-token")
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        assert headers_only(served, ATTEND, *bearer("limited-token")) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "IDENTITY_LIMIT",
        )
        other = start("caller-token")
        assert served.engine.has_queued(2)
        served.gate.open()
        assert [len(call.result().context_vectors.lengths) for call in (held, other)] == [1, 1]
        assert ("Attend", "IDENTITY_LIMIT") in served.calls.refusals


def test_one_identity_cannot_take_all_places(self_model: LoadedModel, guard: Guard) -> None:
    with Served.held(self_model, guard=guard, max_concurrent_calls=10) as served:
        stub = AttentionServiceStub(served.channel)
        calls = [
            stub.Attend.future(attend_request([2]), metadata=bearer("all-token"), timeout=PATIENCE_SECONDS)
            for _ in range(10)
        ]
        assert served.engine.has_queued(8)
        own = stub.Attend.future(
            attend_request([2]), metadata=bearer("caller-token"), timeout=PATIENCE_SECONDS
        )
        assert served.engine.has_queued(1)
        served.gate.open()
        assert own.code() is grpc.StatusCode.OK
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.OK) == 8
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 2
