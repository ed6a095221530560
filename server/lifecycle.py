"""What a server process does at the stages of its life, alone or as one of several workers."""

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.http.child import HttpProcess, http_process
from attention_serving.server.http.options import needs_private_sockets
from attention_serving.server.machine import temporary_folder
from attention_serving.server.models import initial_models, model_store
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint, ProcessesCollector
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import Inbox

log = logging.getLogger(__name__)


class Lifecycle(Protocol):
    """Hooks at the stages of a server process, which runs alone or as one of several workers."""

    def before_loading(self, server: RpcServer, metrics: Metrics) -> None:
        """Called before any model is loaded.

        Raises:
            BindError: An address cannot be listened on.
        """

    def before_serving(self, server: RpcServer, inbox: Inbox) -> bool:
        """Called after loading. Blocks until the server may start; returns whether it should.

        Raises:
            BindError: The address cannot be listened on.
        """

    def serving(self, *, ready: int, failed: int) -> None:
        """Called once the server accepts calls, with the numbers of ready and of failed models."""

    def draining(self) -> None:
        """Called when the process was asked to stop, before the server refuses calls."""

    def close(self) -> None:
        """Called after the server has stopped."""


class Standalone:
    """The only process of the service. It binds its ports and serves its metrics before models load."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._endpoint: MetricsEndpoint | None = None
        self._http: HttpProcess | None = None
        self._ports: dict[str, object] = {}
        self._stack = ExitStack()

    def before_loading(self, server: RpcServer, metrics: Metrics) -> None:
        """Binds the ports, and publishes that the models are not ready.

        Raises:
            RepositoryError: The repository contains no model.
            BindError: An address cannot be listened on.
            WorkerError: The system's folder for temporary files cannot be written to.
        """
        host = self._settings.host
        metrics.loading(initial_models(self._settings, model_store(self._settings)))
        metrics.registry.register(ProcessesCollector(self._processes))
        private_socket = self._private_socket()
        port = server.bind(private_socket)
        self._endpoint = MetricsEndpoint(
            metrics.registry,
            host,
            self._settings.metrics_port,
            metrics.refresh,
            certificates=server.certificates,
            guard=server.guard if self._settings.protect_metrics else None,
        )
        self._ports = {"host": host, "port": port, "metrics_port": self._endpoint.port}
        if self._settings.unix_socket is not None:
            self._ports["unix_socket"] = self._settings.unix_socket
        self._http = http_process(self._settings, port, [private_socket] if private_socket else [])
        if self._http is not None:
            self._ports["http_port"] = self._http.port
        log.info("ports bound", extra=self._ports)

    def _private_socket(self) -> Path | None:
        """A path of its own for the HTTP process, if that needs one."""
        if not needs_private_sockets(self._settings):
            return None
        return self._stack.enter_context(temporary_folder()) / "grpc"

    def before_serving(self, server: RpcServer, inbox: Inbox) -> bool:  # noqa: ARG002 - part of Lifecycle
        """Returns at once."""
        return True

    def serving(self, *, ready: int, failed: int) -> None:
        """Starts the HTTP process, and logs the addresses."""
        if self._http:
            self._http.start()
        log.info("serving", extra={**self._ports, "models": ready, "failed": failed})

    def draining(self) -> None:
        """Lets the requests of the HTTP process arrive."""
        if self._http:
            self._http.drain()

    def _processes(self) -> Mapping[str, int]:
        http = self._http.pid if self._http else None
        return {"server": os.getpid()} | ({} if http is None else {"http": http})

    def close(self) -> None:
        """Ends the HTTP process, and closes the metrics endpoint."""
        if self._http:
            self._http.close()
        if self._endpoint:
            self._endpoint.close()
        self._stack.close()
