"""A gRPC server that records the bytes of each request and refuses it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

# The message of the status of every call.
REFUSAL = "the request was recorded"


@dataclass
class Recorder(grpc.GenericRpcHandler):
    """Records unary calls of any method.

    Attributes:
        requests: The requests as they arrived, serialized.
    """

    requests: list[bytes] = field(default_factory=list)

    def service(
        self,
        handler_call_details: grpc.HandlerCallDetails,  # noqa: ARG002 - all methods are recorded
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """The handler of every method; without deserializers it receives bytes."""
        return grpc.unary_unary_rpc_method_handler(self._record)

    def _record(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.requests.append(request)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, REFUSAL)


@contextmanager
def recording() -> Iterator[tuple[str, list[bytes]]]:
    """Records until the block ends; yields HOST:PORT and the list of requests."""
    recorder = Recorder()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[recorder])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", recorder.requests
    finally:
        server.stop(None).wait()
