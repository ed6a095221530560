"""A gRPC server whose answers a test writes, and the HTTP process in front of it.

It is a real server of the protocol's generated code. What the project's own server answers is tested with it.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2_grpc as pb_grpc
from attention_serving.server.security.peers import ACCESS_CHECK
from tests.server.http.clients import HOST
from tests.server.samples import ROOT

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
Behaviour = Callable[[Any, grpc.ServicerContext], Message]


class Received(NamedTuple):
    """One call that arrived."""

    method: str
    request: Any
    metadata: dict[str, str]


class Scripted:
    """Answers calls as a test says, and records them.

    Attributes:
        port: Its port.
        calls: What has arrived.
        behaviours: What answers a method; by default an empty reply does.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Received] = SimpleQueue()
        self.behaviours: dict[str, Behaviour] = {}
        self._server = grpc.server(ThreadPoolExecutor(16))
        # The class is abstract to type checkers; the methods are set below.
        servicer = pb_grpc.GRPCInferenceServiceServicer()  # type: ignore[abstract]
        for method in SERVICE.methods:
            if method.name != "ModelStreamInfer":
                setattr(servicer, method.name, self._handler(method.name))
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, self._server)
        self._server.add_generic_rpc_handlers((self._access(),))
        self.port = self._server.add_insecure_port(f"{HOST}:0")
        self._server.start()

    def next(self) -> Received:
        """The next call."""
        return self.calls.get(timeout=60)

    def close(self) -> None:
        self._server.stop(0).wait()

    def _access(self) -> grpc.GenericRpcHandler:
        """Answers every question whether a caller may call with yes."""

        def check(request: bytes, context: grpc.ServicerContext) -> bytes:
            metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
            self.calls.put(Received("Check", request, metadata))
            return b""

        service, _, method = ACCESS_CHECK[1:].partition("/")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method: grpc.unary_unary_rpc_method_handler(check)
        }
        return grpc.method_handlers_generic_handler(service, handlers)

    def _handler(self, name: str) -> Behaviour:
        reply = getattr(pb, SERVICE.methods_by_name[name].output_type.name)

        def handle(request: Any, context: grpc.ServicerContext) -> Message:
            metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
            self.calls.put(Received(name, request, metadata))
            behaviour = self.behaviours.get(name)
            answer: Message = behaviour(request, context) if behaviour else reply()
            return answer

        return handle


class Blocked:
    """Answers no call before `release`; knows whether the caller has left."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._released = threading.Event()

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Message:
        context.add_callback(self._ended)
        self._released.wait(60)
        return pb.ModelInferResponse(model_name=request.model_name)

    def _ended(self) -> None:
        if not self._released.is_set():
            self.cancelled.set()

    def release(self) -> None:
        self._released.set()


class Front(NamedTuple):
    """A running HTTP process."""

    process: "subprocess.Popen[str]"
    port: int


@contextmanager
def front(target: str, *options: str) -> Iterator[Front]:
    """Runs `python -m server.http` until the block ends."""
    command = [sys.executable, "-m", "server.http", f"--target={target}", "--port=0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert " serving " in line
            yield Front(process, int(line.split("http_port=")[1].split()[0]))
        finally:
            process.kill()
