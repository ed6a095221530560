"""The HTTP endpoint for Prometheus: /metrics and nothing else, for a bounded number of clients at a time."""

import gzip
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.errors import BindError
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.rights import Right
from attention_serving.server.tls.files import CurrentCertificates

log = logging.getLogger(__name__)

PATH = "/metrics"
ALLOWED = "GET, HEAD, OPTIONS"
# Connections beyond this number are closed with status 503.
MAX_CONNECTIONS = 16
# How long a connection may last, from its begin until the response has been sent.
MAX_CONNECTION_SECONDS = 10.0
# How long to wait after a connection could not be accepted.
RETRY_SECONDS = 0.5
STATUSES = {
    Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
}
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class MetricsEndpoint:
    """Serves the metrics of a registry at /metrics, over HTTP or HTTPS, until it is closed."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        refresh: Callable[[], None] = lambda: None,
        *,
        certificates: CurrentCertificates | None = None,
        max_connection_seconds: float = MAX_CONNECTION_SECONDS,
        guard: Guard | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            registry: The metrics.
            host: Address or host name.
            port: 0 selects a free port.
            refresh: Called before the metrics are read.
            certificates: Give the certificate of the next connection; None encrypts nothing.
            max_connection_seconds: How long a connection may last, in seconds. Then it is closed.
            guard: Knows who may read the metrics; None lets everyone.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        try:
            self._server = _Server(
                host.strip("[]"), port, registry, refresh, certificates, max_connection_seconds
            )
        except OSError as error:
            raise BindError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
        self._server.guard = guard
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, TCPServer):
    """One thread for each connection; both their number and their time are bounded."""

    allow_reuse_address = True
    daemon_threads = True
    guard: Guard | None = None
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        refresh: Callable[[], None],
        certificates: CurrentCertificates | None,
        max_connection_seconds: float,
    ) -> None:
        self.registry, self.refresh = registry, refresh
        self._certificates = certificates
        self._max_connection_seconds = max_connection_seconds
        # When each open connection began.
        self._began: dict[socket.socket, float] = {}
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. Its thread does the handshake, with the first byte that it reads."""
        try:
            accepted, address = super().get_request()
        except OSError:  # without descriptors, the loop that accepts would not wait otherwise
            time.sleep(RETRY_SECONDS)
            raise
        if self._certificates is None:
            return accepted, address
        context = self._certificates().context
        return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

    def verify_request(self, request: Any, client_address: object) -> bool:  # noqa: ARG002 - as socketserver calls it
        """Refuses a connection if as many are open as there may be."""
        if len(self._began) < MAX_CONNECTIONS:
            self._began[request] = time.monotonic()
            return True
        with suppress(OSError):  # an error here would end the thread
            request.settimeout(0)
            request.send(BUSY)
        return False

    def service_actions(self) -> None:
        """Ends connections that have lasted for too long. Called twice a second, and after each new one."""
        latest = time.monotonic() - self._max_connection_seconds
        for connection, began in list(self._began.items()):
            if began <= latest:
                with suppress(OSError):  # it has just ended by itself
                    # Not that of an encrypted socket, which would send unencrypted until it is done.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Called by a connection's thread when it has ended."""
        self._began.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - as socketserver calls it
        """Logs a failed connection."""
        log.debug("metrics connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    server_version, sys_version = "attention-serving", ""
    error_message_format = "%(code)d %(message)s: %(explain)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        """The metrics, in the format and the encoding that the client asks for."""
        url = urlsplit(self.path)
        if url.path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"only {PATH} is served on this port")
            return
        if not self._is_permitted():
            return
        self.server.refresh()
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        names = parse_qs(url.query).get("name[]")
        body = encode(self.server.registry.restricted_registry(names) if names else self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        if gzip_accepted(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_permitted(self) -> bool:
        """Whether the caller may read the metrics; refuses one that may not."""
        if self.server.guard is None:
            return True
        given = self.headers.get_all("Authorization") or []
        try:
            identity = self.server.guard.identify(
                [("authorization", value) for value in given],
                tuple,
                lambda: f"{self.client_address[0]}:{self.client_address[1]}",
            )
            identity.require(Right.READ)
        except EngineError as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: EngineError) -> None:
        status = STATUSES.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE)
        body = f"{error.message}\n".encode()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", self.error_content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that the library looks for

    def do_OPTIONS(self) -> None:
        """The methods."""
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Allow", ALLOWED)
        self.end_headers()

    def do_POST(self) -> None:
        """Refuses to change anything."""
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        self.send_header("Allow", ALLOWED)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_PATCH = do_DELETE = do_TRACE = do_CONNECT = do_POST  # noqa: N815 - as above

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the library uses
        """Logs nothing: scrapes are frequent."""
