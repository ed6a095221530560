"""One server process: binds its ports, loads the models, serves, and drains when asked to stop."""

import gc
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NoReturn, Protocol

from server import memory
from server.call_log import CallLog
from server.engine.control import RepositoryControl
from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.repository import Key, Repository
from server.engine.store import ModelStore, RepositoryError
from server.engine.version_policy import VersionPolicy
from server.errors import LoadError
from server.http.options import options_of
from server.http.process import HttpProcess
from server.metrics import Metrics
from server.metrics_endpoint import MetricsEndpoint
from server.model_control import ALL, ControlMode, ModelControl, read_loaded
from server.rpc.options import RpcOptions
from server.rpc.server import RpcServer
from server.rpc.transport import TransportKind
from server.settings import Settings
from server.shutdown import EXIT_SECONDS, Inbox, StopRequest
from server.workers.peers import WorkerPeers

log = logging.getLogger(__name__)
# Memory that a model needs, as a multiple of its files (weights in the layout of the kernels, for runs on one
# thread and on all) and in addition to it.
HEADROOM_FACTOR, HEADROOM_BYTES = 3, 64 << 20

# How long the HTTP process may take to send its answers once the gRPC server has stopped.
HTTP_EXIT_SECONDS = 2.0


class Lifecycle(Protocol):
    """Hooks at the stages of a server process, which runs alone or as one of several workers."""

    @property
    def peers(self) -> WorkerPeers | None:
        """The processes of the service, if there are several."""

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

    peers = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._endpoint: MetricsEndpoint | None = None
        self._http: HttpProcess | None = None
        self._ports: dict[str, object] = {}

    def before_loading(self, server: RpcServer, metrics: Metrics) -> None:
        """Binds the ports, and publishes that the models are not ready.

        Raises:
            RepositoryError: The repository contains no model.
            BindError: An address cannot be listened on.
        """
        host = self._settings.host
        metrics.loading(initial_models(self._settings, model_store(self._settings)))
        port = server.bind()
        self._endpoint = MetricsEndpoint(metrics.registry, host, self._settings.metrics_port, metrics.refresh)
        self._ports = {"host": host, "port": port, "metrics_port": self._endpoint.port}
        if self._settings.unix_socket is not None:
            self._ports["unix_socket"] = self._settings.unix_socket
        if self._settings.http_port is not None:
            self._http = HttpProcess(options_of(self._settings, port), host, self._settings.http_port)
            self._ports["http_port"] = self._http.port
        log.info("ports bound", extra=self._ports)

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

    def close(self) -> None:
        """Ends the HTTP process, and closes the metrics endpoint."""
        if self._http:
            self._http.close(HTTP_EXIT_SECONDS)
        if self._endpoint:
            self._endpoint.close()


def run(settings: Settings, lifecycle: Lifecycle, inbox: Inbox) -> None:
    """Serves until a `StopRequest` arrives, and returns when every accepted call has been answered.

    A request that arrives while models load ends the process at once with status 0: no call has been
    accepted, and a load in progress cannot be interrupted.

    Raises:
        LoadError: The repository does not contain a model that can be served.
        BindError: An address cannot be listened on.
    """
    metrics = Metrics()
    server = RpcServer(rpc_options(settings), CallLog(metrics))
    try:
        lifecycle.before_loading(server, metrics)
        repository = _load(settings, inbox)
        metrics.loaded(repository)
        if lifecycle.before_serving(server, inbox):
            engine = Engine(
                repository,
                settings.limits,
                metrics,
                awake_seconds=settings.awake_seconds,
                parallel_runs=settings.device.parallel_runs,
            )
            metrics.watch(engine.load, server.load)
            _serve(settings, server, engine, metrics, lifecycle, inbox)
    except RepositoryError as error:
        raise LoadError(str(error)) from error
    finally:
        server.stop(0)
        lifecycle.close()
    log.info("stopped")


def model_store(settings: Settings) -> ModelStore:
    """The model repository on disk."""
    policy = VersionPolicy.parse(settings.version_policy)
    return ModelStore(settings.model_repository, settings.device, settings.max_tolerance, policy)


def initial_models(settings: Settings, store: ModelStore) -> list[Key]:
    """Name and version of the artifacts that are loaded at startup.

    Raises:
        RepositoryError: The folder does not exist, or a model that is to be loaded does not exist.
    """
    names, mode = store.names(), ControlMode(settings.model_control)
    if mode is ControlMode.NONE:
        return store.artifacts(names)
    if mode is ControlMode.EXPLICIT:
        asked = [name.strip() for name in settings.load_model.split(",") if name.strip()]
        if unknown := sorted(set(asked) - {ALL, *names}):
            raise RepositoryError(f"--load-model: the repository does not contain {', '.join(unknown)}")
        if ALL not in asked:
            names = sorted({*asked, *read_loaded(store.folder)} & set(names))
    return [(name, version) for name in names for version in store.chosen(name)]


def rpc_options(settings: Settings) -> RpcOptions:
    """The options of the gRPC server."""
    return RpcOptions(
        host=settings.host,
        port=settings.port,
        unix_socket=settings.unix_socket,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_calls=settings.max_concurrent_calls,
        max_streams=settings.max_streams,
        stream_window=settings.stream_window,
        max_waiting_calls=settings.max_waiting_calls,
        max_calls_per_connection=settings.max_calls_per_connection,
        max_connections=settings.max_connections,
        send_timeout_seconds=settings.send_timeout_seconds,
        receive_timeout_seconds=settings.receive_timeout_seconds,
        stream_idle_seconds=settings.stream_idle_seconds,
        connection_idle_seconds=settings.connection_idle_seconds,
        connection_age_seconds=settings.connection_age_seconds,
        connection_age_grace_seconds=settings.connection_age_grace_seconds,
        keepalive_seconds=settings.keepalive_seconds,
        allow_shared_memory=settings.allow_shared_memory,
        share_port=settings.workers > 1,
        transport=TransportKind(settings.transport),
    )


def _load(settings: Settings, inbox: Inbox) -> Repository:
    """Loads the models on another thread, so that this one can receive a request to stop."""
    log.info("loading", extra={"model_repository": settings.model_repository})
    store = model_store(settings)
    keys = initial_models(settings, store)
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    loading: Future[Repository] = loader.submit(lambda: Repository(store.load(*key) for key in keys))
    loading.add_done_callback(inbox.put)
    message = inbox.get()
    if isinstance(message, StopRequest):
        _abandon_loading(message)
    loader.shutdown()
    repository = loading.result()
    is_fixed = ControlMode(settings.model_control) is ControlMode.NONE
    if is_fixed and not any(isinstance(model, LoadedModel) for model in repository):
        raise RepositoryError(
            f"no model of {settings.model_repository} can be served; the log gives the reasons"
        )
    return repository


def _abandon_loading(request: StopRequest) -> NoReturn:
    log.info("stopped while loading", extra=request.fields)
    logging.shutdown()
    # Not sys.exit: the interpreter would wait for the loader, and the runtime would be torn down below it.
    os._exit(0)


def _serve(
    settings: Settings,
    server: RpcServer,
    engine: Engine,
    metrics: Metrics,
    lifecycle: Lifecycle,
    inbox: Inbox,
) -> None:
    def changed() -> None:
        metrics.loaded(engine.repository)
        server.show_models()

    store = model_store(settings)
    changes = RepositoryControl(store, engine.repository, changed, partial(_lack_of_memory, store))
    control = ModelControl(changes, ControlMode(settings.model_control), lifecycle.peers)
    if lifecycle.peers is not None:
        lifecycle.peers.start(control.take)
    # Numbers only: a model that is replaced must not be kept.
    ready = [isinstance(model, LoadedModel) for model in engine.repository]
    try:
        _freeze_loaded_objects()
        server.start(engine, control)
        if ControlMode(settings.model_control) is ControlMode.POLL:
            control.poll(settings.repository_poll_seconds)
        lifecycle.serving(ready=ready.count(True), failed=ready.count(False))
        _wait_for_stop(inbox)
        _end_after(settings.grace_seconds + EXIT_SECONDS)
        seconds = _drain(settings.grace_seconds, server, lifecycle)
        log.info("drained", extra={"seconds": round(seconds, 3), "grace_seconds": settings.grace_seconds})
    finally:
        control.close()
        engine.close()


def _lack_of_memory(store: ModelStore, name: str, version: str) -> str:
    """Why an artifact cannot be loaded beside what is there; empty if it can."""
    files = (store.folder / name / version).iterdir()
    needed = HEADROOM_BYTES + HEADROOM_FACTOR * sum(file.stat().st_size for file in files)
    free = memory.free_bytes()
    return f"it needs about {needed} bytes of memory; {free} are free" if needed > free else ""


def _drain(grace_seconds: float, server: RpcServer, lifecycle: Lifecycle) -> float:
    """Returns the seconds that it took."""
    started = time.monotonic()
    lifecycle.draining()
    server.stop(max(0.0, grace_seconds - (time.monotonic() - started)))
    return time.monotonic() - started


def _end_after(seconds: float) -> None:
    """Ends the process after a time: a run or a thread that does not return must not hold it up for ever."""

    def end() -> None:
        log.error("ended: calls or runs did not end in time", extra={"seconds": seconds})
        logging.shutdown()
        os._exit(1)

    if seconds <= threading.TIMEOUT_MAX:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


def _freeze_loaded_objects() -> None:
    """Exempts what was loaded from garbage collection: it stays until the process ends."""
    gc.collect()
    gc.freeze()


def _wait_for_stop(inbox: Inbox) -> None:
    while not isinstance(request := inbox.get(), StopRequest):
        pass
    log.info("draining", extra=request.fields)
