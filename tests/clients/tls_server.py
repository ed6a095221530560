"""A gRPC server with mutual TLS in this process, which notes the name of each caller."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_server import Service, running

from tests.support.certificates import Authority


@dataclass(frozen=True)
class TlsServer:
    """A running server.

    Attributes:
        target: HOST:PORT.
        ca: The authority that has signed the server's certificate.
        callers: The name in the certificate of each call, and its token.
    """

    target: str
    ca: bytes
    callers: list[tuple[str, str]]


@contextmanager
def tls_server(clients: bytes, *names: str) -> Iterator[TlsServer]:
    """Serves until the block ends.

    Args:
        clients: The authorities of its clients.
        names: Names in its certificate; none for those of loopback.
    """
    callers: list[tuple[str, str]] = []

    def note(context: grpc.ServicerContext) -> None:
        found: Any = context.auth_context()
        metadata = dict(context.invocation_metadata())
        name = found["x509_subject_alternative_name"][0].decode()
        callers.append((name, str(metadata.get("authorization", ""))))

    authority = Authority("server")
    pair = authority.issue(*names)
    credentials = grpc.ssl_server_credentials(
        [(pair.key, pair.certificate)], clients, require_client_auth=True
    )
    with running(Service(note), credentials=credentials) as target:  # type: ignore[abstract]
        yield TlsServer(target, authority.pem, callers)
