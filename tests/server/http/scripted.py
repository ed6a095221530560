"""A gRPC server whose answers a test writes, and the HTTP server in front of it, both in this process."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.tei.v1 import tei_pb2
from attention_serving.server.addresses import listen
from attention_serving.server.http.server import HttpServer
from attention_serving.server.security.peers import ACCESS_CHECK
from attention_serving.server.settings import Settings
from tests.server.http.clients import HOST
from tests.server.seams import PATIENCE_SECONDS

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICES = (
    SERVICE,
    attention_pb2.DESCRIPTOR.services_by_name["AttentionService"],
    tei_pb2.DESCRIPTOR.services_by_name["Info"],
)
# The classes of request and reply of each method.
METHODS: dict[str, tuple[Any, Any]] = {
    f"/{service.full_name}/{method.name}": (
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
    )
    for service in SERVICES
    for method in service.methods
} | {ACCESS_CHECK: (StringValue, StringValue)}
Behaviour = Callable[[Any, grpc.ServicerContext], Message]


class Received(NamedTuple):
    """One call that arrived."""

    method: str
    request: Any
    metadata: dict[str, str]


class Scripted(grpc.GenericRpcHandler):
    """Answers calls as a test says, and records them.

    Attributes:
        target: Its private socket.
        calls: What has arrived.
        behaviours: What answers a method, by its last name; by default an empty reply does.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Received] = SimpleQueue()
        self.behaviours: dict[str, Behaviour] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), [self])
        self._folder = TemporaryDirectory()
        self.target = f"unix:{self._folder.name}/grpc"
        local = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
        self._server.add_secure_port(self.target, local)
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        path = details.method
        name, (request_type, reply_type) = path.rpartition("/")[2], METHODS[path]

        def handle(request: Any, context: grpc.ServicerContext) -> Message:
            metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
            self.calls.put(Received(name, request, metadata))
            behaviour = self.behaviours.get(name)
            reply: Message = behaviour(request, context) if behaviour else reply_type()
            return reply

        return grpc.unary_unary_rpc_method_handler(
            handle, request_type.FromString, reply_type.SerializeToString
        )

    def next(self, method: str = "") -> Received:
        """The next call, or the next one of a method."""
        while True:
            received = self.calls.get(timeout=PATIENCE_SECONDS)
            if method in ("", received.method):
                return received

    def answer(self, method: str, reply: Message) -> None:
        """Answers a method with this reply from now on."""
        self.behaviours[method] = lambda *_: reply

    def close(self) -> None:
        self._server.stop(0).wait()
        self._folder.cleanup()


class Blocked:
    """Answers no call before `release`; knows whether the caller has left."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._released = threading.Event()

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Message:
        context.add_callback(self._ended)
        self._released.wait(PATIENCE_SECONDS)
        return pb.ModelInferResponse(model_name=request.model_name)

    def _ended(self) -> None:
        if not self._released.is_set():
            self.cancelled.set()

    def release(self) -> None:
        self._released.set()


class Front(NamedTuple):
    """A running HTTP server."""

    port: int
    server: HttpServer


@contextmanager
def front(target: str | Scripted, **settings: Any) -> Iterator[Front]:
    """Serves HTTP in front of a gRPC server with some settings until the block ends."""
    targets = [target if isinstance(target, str) else target.target]
    validated = Settings.model_validate({"model_repository": ".", "grace_seconds": 5, **settings})
    sockets, created = listen(HOST, 0), Future[HttpServer]()
    port = sockets[0].getsockname()[1]

    async def serve() -> None:
        created.set_result(HttpServer(validated, targets))
        await created.result().serve(sockets)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    running = Front(port, created.result(PATIENCE_SECONDS))
    try:
        yield running
    finally:
        running.server.stop()
        thread.join()
