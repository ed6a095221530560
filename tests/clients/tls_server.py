"""A gRPC server with mutual TLS in this process, which notes the name of each caller."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1 import attention_pb2_grpc as pb_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attention_serving.server.security.peers import names_in
from attention_serving.server.tls import watch
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.transport.options import tls_credentials
from tests.support.certificates import HOST, Authority, Mounted


class Service(pb_grpc.AttentionServiceServicer):
    """Returns queries as context vectors.

    Attributes:
        callers: The name in the certificate of each call, and its token.
    """

    def __init__(self) -> None:
        self.callers: list[tuple[str, str]] = []

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        self._note(context)
        return pb.ListModelsResponse(models=[pb.Model(name="m", version="1", state=pb.Model.STATE_READY)])

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        self._note(context)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "only streams and lists are served")

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._note(context)
        return pb.AttendResponse(context_vectors=request.query)

    def AttendStream(  # noqa: N802
        self, requests: Iterator[pb.AttendStreamRequest], context: grpc.ServicerContext
    ) -> Any:
        self._note(context)
        for item in requests:
            response = pb.AttendResponse(context_vectors=item.request.query)
            yield pb.AttendStreamResponse(id=item.id, response=response)

    def _note(self, context: grpc.ServicerContext) -> None:
        found: Any = context.auth_context()
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        (name,) = names_in(found["x509_pem_cert"][0])
        self.callers.append((name, metadata.get("authorization", "")))


class TlsServer:
    """A running server.

    Attributes:
        authority: Has signed the server's certificate.
        service: What it serves.
        port: Its port.
    """

    def __init__(self, folder: Path, clients: bytes, *names: str) -> None:
        """Starts it.

        Args:
            folder: For its files.
            clients: The authorities of its clients.
            names: Names in its certificate; none for those of loopback.
        """
        self.authority, self.service = Authority("server"), Service()
        self._mounted = Mounted(folder / "server", self.authority.issue(*names), clients)
        files = TlsFiles(
            certificate=self._mounted.certificate, key=self._mounted.key, client_ca=self._mounted.ca
        )
        self._reloader = watch(files)
        self._server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_AttentionServiceServicer_to_server(self.service, self._server)
        checks = health.HealthServicer()
        checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self.port = self._server.add_secure_port(f"{HOST}:0", tls_credentials(self._reloader.current))
        self._server.start()

    @property
    def target(self) -> str:
        return f"{HOST}:{self.port}"

    def admit(self, clients: bytes) -> None:
        """Changes the authorities of its clients for new connections."""
        self._mounted.write(self.authority.issue(), clients)
        self._reloader.look()

    def close(self) -> None:
        self._server.stop(0).wait()
