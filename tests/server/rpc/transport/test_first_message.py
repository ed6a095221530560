"""The first message of a stream is sent, and its completion is reported, if a second is announced."""

import queue
from typing import Any

import grpc

from attention_serving.server.rpc.transport.call import Call
from attention_serving.server.rpc.transport.completion_queue import CompletionQueueTransport
from tests.server.seams import PATIENCE_SECONDS


def test_the_second_message_follows_a_first_that_announced_it() -> None:
    """The second is sent once the first was, as every stream does it."""
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    transport = CompletionQueueTransport({})
    port = transport.listen("127.0.0.1:0")
    transport.start(accept=calls.put, run_inline=lambda: False)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_stream("/any/Method")
        answers = method(b"", timeout=PATIENCE_SECONDS)
        call = calls.get(timeout=PATIENCE_SECONDS)

        def send_second(_: bool) -> None:
            call.send(b"second", lambda _: call.finish(grpc.StatusCode.OK))

        call.call_soon_threadsafe(lambda: call.send(b"first", send_second, more=True))
        assert list(answers) == [b"first", b"second"]
    transport.stop(0, list)
