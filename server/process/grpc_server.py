"""The gRPC server: its address, its limits, and its life from `bind` over `start` to `stop`."""

import dataclasses
import math
import os
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from attention_serving.server.addresses import address_of
from attention_serving.server.api.admission import AdmissionControl
from attention_serving.server.api.calls import CallLoad, Calls, Recorder
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.methods import HealthService, all_methods
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.events import EventLog
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.errors import ServerError
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.tls import WatchedCertificates
from attention_serving.server.settings import Settings
from attention_serving.server.transport.create import create_transport, tls_credentials
from attention_serving.server.transport.drain import count_connections

# The transport's thread looks for work many times a second. It is responsive if it did within this time.
RESPONSIVE_SECONDS = 3.0
# The longest path of a Unix domain socket. Source: unix(7).
MAX_SOCKET_BYTES = 107
# How old a number of connections may be before they are counted again.
COUNT_SECONDS = 10.0


class GrpcServer:
    """The gRPC server, from `bind` over `start` to `stop`.

    `bind` needs no engine, so that a port that is in use is found before models are loaded. Connections
    that clients make between `bind` and `start` wait in the operating system's queue, and so do their
    calls, until `start` or their deadlines. They fail with UNAVAILABLE or CANCELLED if the server stops
    without having started.

    Attributes:
        certificates: Have the certificate of the next handshake; None without TLS.
        guard: Authenticates and authorises calls; None allows everything.
    """

    def __init__(
        self,
        settings: Settings,
        events: EventLog,
        *,
        certificates: WatchedCertificates | None = None,
        guard: Guard | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Creates a server that is not bound.

        Args:
            settings: Where it listens, and how much it takes.
            events: Receives an event for every call that ended.
            certificates: Have the certificate of the next handshake on its port; None encrypts nothing.
            guard: Authenticates and authorises calls; None allows everything.
            recorder: Decides which calls are recorded; None if none is.
        """
        self._settings, self._events, self._recorder = settings, events, recorder
        self.certificates, self.guard = certificates, guard
        self._health, self._codec_threads = HealthService(), CodecThreads()
        self._calls: Calls | None = None
        self._engine: Engine | None = None
        self._sockets: list[Path] = []
        self._transport = create_transport(settings)
        self._connections, self._counted_at = 0, -math.inf

    def bind(self, private_socket: Path | None = None) -> int:
        """Binds the address and the Unix domain sockets. Returns the port, chosen by the system for port 0.

        Args:
            private_socket: Path of a socket for the HTTP process, if there is one, in a folder that only this
                user can open. Its calls need neither TLS nor a certificate, and may name the client that they
                are for.

        Raises:
            ServerError: An address is in use, or cannot be used on this machine.
        """
        encryption = tls_credentials(self.certificates) if self.certificates else None
        port = self._listen(address_of(self._settings.host, self._settings.port), encryption)
        if self._settings.unix_socket is not None:
            self._listen_on_socket(self._settings.unix_socket)
        if private_socket is not None:
            credentials = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
            self._listen_on_socket(private_socket, credentials)
        return port

    def _listen_on_socket(self, path: Path, credentials: grpc.ServerCredentials | None = None) -> None:
        """Listens on a path. A socket without a listener is replaced.

        gRPC's core would replace the socket of a running server too, and remove the path when it stops, even
        if a later server listens there. So it binds a name of its own, which is then changed.
        """
        bound, failure = path.with_name(f".{os.getpid()}"), f"cannot listen on {path}"
        size = max(len(os.fsencode(path)), len(os.fsencode(bound)))
        if size > MAX_SOCKET_BYTES:
            limit = f"the limit of a socket's path is {MAX_SOCKET_BYTES}"
            raise ServerError(f"{failure}: its path has {size} bytes; {limit}; choose a shorter one")
        if "," in str(path):
            reason = "gRPC's clients take the comma for the end of the path; choose another"
            raise ServerError(f"{failure}: {reason}")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                is_taken = path.exists() and (not path.is_socket() or probe.connect_ex(str(path)) == 0)
            if is_taken:
                raise ServerError(f"{failure}: another process does, or it is another kind of file")
            bound.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(bound))  # gRPC, which replaces it, does not tell why it cannot listen
        except OSError as error:
            raise ServerError(f"{failure}: {error.strerror}") from error
        self._listen(f"unix:{quote(os.fsencode(bound))}", credentials)
        bound.rename(path)
        self._sockets.append(path)

    def _listen(self, target: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            return self._transport.listen(target, credentials)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {target}: {error}") from error

    def start(self, engine: Engine, control: ModelControl) -> None:
        """Begins to answer calls, and reports health SERVING. `bind` comes first.

        Args:
            engine: Computes what calls ask for. Its owner closes it after `stop`.
            control: Loads and unloads models on request.
        """
        self._engine = engine
        admission = AdmissionControl(self._settings, engine.check_deadline, self.guard)
        memory = SharedMemory(is_on=self._settings.allow_shared_memory)
        options: dict[str, Any] = {
            "authenticate": admission.authenticate,
            "max_calls": self._settings.max_concurrent_calls,
        }
        methods = all_methods(engine, self._codec_threads, self._health, control, memory, **options)
        self._calls = calls = Calls(methods, self._events, admission, recorder=self._recorder)
        # First: health checks that have waited for the start are answered at once.
        self._health.set_serving(serving=True)
        self.show_models()
        self._transport.start(calls.serve, engine.run_inline)

    def stop(self, grace: float) -> None:
        """Reports NOT_SERVING, refuses new calls with UNAVAILABLE and waits for those that are open.

        Health watchers and streams end once what was received has been answered. May be called before
        `start`, before `bind`, and more than once.

        Args:
            grace: Seconds that the calls may take; those that are left then end with UNAVAILABLE.
        """
        self._health.set_serving(serving=False)
        self.show_models()
        while self._sockets:
            self._sockets.pop().unlink(missing_ok=True)
        self._transport.stop(grace, self._drain)
        self._codec_threads.close()

    def load(self) -> CallLoad:
        """The calls that are open now, and the connections as last counted. For any thread."""
        now = time.monotonic()
        if now - self._counted_at >= COUNT_SECONDS:
            self._counted_at = now
            self._connections = count_connections(self._transport.addresses)
        load = self._calls.load() if self._calls else CallLoad()
        return dataclasses.replace(load, open_connections=self._connections)

    def _drain(self) -> None:
        if self._calls is not None:
            self._calls.drain()
        self._health.drain()

    def show_models(self) -> None:
        """Reports the health of every model, by its name: SERVING while a version of it is ready."""
        ready = set[str]()
        if self._engine is not None and self._health.is_serving():
            ready = {model.name for model in self._engine.repository.loaded_models}
        self._health.set_models(ready)

    def is_responsive(self) -> bool:
        """Whether the transport's thread takes events and callbacks. For any thread, once started."""
        return time.monotonic() - self._transport.now <= RESPONSIVE_SECONDS
