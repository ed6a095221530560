"""The first message of a stream is sent, and its completion is reported, if a second is announced."""

from typing import Any

import grpc

from attention_serving.server.transport.completion_queue import CompletionQueueTransport
from tests.server.seams import PATIENCE_SECONDS
from tests.server.transport.driven import Driven


def test_the_second_message_follows_a_first_that_announced_it() -> None:
    """The second is sent once the first was, as every stream does it."""
    driven = Driven()
    transport = CompletionQueueTransport({})
    port = transport.listen("127.0.0.1:0")
    transport.start(driven.serve, lambda: False)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_stream("/any/Method")
        answers = method(b"", timeout=PATIENCE_SECONDS)
        call = driven.next_call()
        assert driven.send(call, b"first", more=True)
        assert driven.send(call, b"second")
        call.post(lambda: call.finish(grpc.StatusCode.OK))
        assert list(answers) == [b"first", b"second"]
    transport.stop(0, list)
