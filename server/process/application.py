"""One server process: binds its ports, loads the models, serves, and drains when asked to stop."""

import gc
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ChangeKind, ModelControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Key, Repository
from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.provider import Provider, ProviderError
from attention_serving.server.errors import ServerError
from attention_serving.server.http import HttpProcess
from attention_serving.server.machine import temporary_folder
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint, ProcessesCollector
from attention_serving.server.process.audit import Audit
from attention_serving.server.process.canary import Canary
from attention_serving.server.process.grpc_server import RpcServer
from attention_serving.server.process.settings import Settings
from attention_serving.server.process.shutdown import EXIT_SECONDS, Inbox, StopRequest, end_after
from attention_serving.server.security.tls import current_certificates
from attention_serving.server.transport.options import RpcOptions

log = logging.getLogger(__name__)
# Objects that are made, beyond those that are freed, between two garbage collections.
YOUNG_OBJECTS = 50_000
# Of `load_model`.
ALL = "*"


def run(settings: Settings, inbox: Inbox) -> None:
    """The only process of a service: serves until a `StopRequest` arrives and every call has been answered.

    If a request arrives while models load, it returns at once, while a load is in progress: no call has been
    accepted, and a load cannot be interrupted.

    Raises:
        ServerError: The process cannot serve.
    """
    with ExitStack() as stack:
        sockets = []
        if settings.http_port is not None:
            sockets = [Path(stack.enter_context(temporary_folder()), "grpc")]
        application = stack.enter_context(closing(Application(settings)))
        server, metrics = application.server, application.metrics
        port = server.bind(sockets)
        endpoint = MetricsEndpoint(
            metrics.registry,
            settings.host,
            settings.metrics_port,
            metrics.refresh,
            certificates=server.certificates,
            guard=server.guard if settings.protect_metrics else None,
        )
        http = HttpProcess(settings, sockets, metrics.refusals)
        stack.callback(http.close)
        metrics.registry.register(ProcessesCollector("server", {"http": http}))
        ports = {"host": settings.host, "port": port, "metrics_port": endpoint.port, **http.ports}
        if settings.unix_socket is not None:
            ports["unix_socket"] = settings.unix_socket
        log.info("ports bound", extra=ports)
        if not application.load(inbox):
            return
        models = application.start()
        http.start()
        log.info("serving", extra=ports | models)
        application.drain(inbox, http)
    log.info("stopped")


class Application:
    """The parts of a server process, and the steps of its life: `load`, `start`, `drain` and `close`.

    Attributes:
        settings: Its settings, with a provider that this machine has.
        metrics: What is counted of it.
        server: The gRPC server. It is bound before `start`.
    """

    def __init__(self, settings: Settings) -> None:
        """Loads nothing yet.

        Raises:
            ServerError: CUDA, a certificate, the tokens file or keys of JSON Web Tokens cannot be used; or
                there is no repository, or it lacks a model that is to be loaded.
        """
        self.settings = settings = resolve(settings)
        self._store = model_store(settings)
        self._models = initial_models(settings, self._store)
        self.metrics = Metrics()
        self.metrics.loading(self._models)
        certificates = current_certificates(settings.tls_files, self.metrics.reloaded)
        if certificates is not None:
            self.metrics.certificates_in_use(certificates())
        self._recorder = Recorder(settings.log_requests, host=settings.host, port=settings.port)
        self.metrics.configured(settings)
        self.server = RpcServer(
            rpc_options(settings),
            self.metrics.events,
            certificates=certificates,
            guard=settings.guard(self.metrics.reloaded),
            recorder=self._recorder if self._recorder.is_on else None,
        )
        # What is closed before the gRPC server.
        self._stack = ExitStack()

    def load(self, inbox: Inbox) -> bool:
        """Loads the models; returns whether they are loaded, or the process was asked to stop meanwhile.

        Raises:
            ServerError: The repository does not contain a model that can be served.
        """
        settings, server, metrics = self.settings, self.server, self.metrics
        repository = load_models(settings, self._store, self._models, inbox)
        if repository is None:
            return False
        self._stack.callback(repository.close)
        metrics.loaded(repository)
        for model in repository:
            metrics.model_changed(model.name, ChangeKind.LOAD, isinstance(model, LoadedModel))
        engine = Engine(
            repository,
            settings.limits,
            metrics.events,
            awake_seconds=settings.awake_seconds,
            parallel_runs=settings.device.parallel_runs,
            context_folder=settings.context_folder,
        )
        self._stack.callback(engine.close)
        metrics.watch(engine.load, server.load)

        def changed() -> None:
            metrics.loaded(repository)
            server.show_models()

        is_explicit = settings.model_control == "explicit"
        report = metrics.model_changed
        control = ModelControl(self._store, repository, changed, report, is_explicit=is_explicit)
        self._stack.callback(control.close)
        canary = Canary(repository, control.withdraw, metrics, settings.canary_seconds)
        self._stack.callback(canary.close)
        if settings.audit_fraction:
            audit = Audit(engine, control.withdraw, metrics, settings.audit_fraction)
            self._stack.callback(audit.close)
            audit.start()
        self._engine, self._control, self._canary = engine, control, canary
        return True

    def start(self) -> dict[str, int]:
        """Begins to answer calls; returns the numbers of ready and of failed models, for the log."""
        # Numbers only: a model that is replaced must not be kept.
        ready = [isinstance(model, LoadedModel) for model in self._engine.repository]
        # What was loaded is exempt from garbage collection: it stays until the process ends. What requests
        # allocate is freed by reference counting, so that the collector looks for cycles less often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, 20, 20)
        self.server.start(self._engine, self._control)
        if self.settings.model_control == "poll":
            self._control.poll(self.settings.repository_poll_seconds)
        if self.settings.canary_seconds:
            self._canary.start()
        return {"models": ready.count(True), "failed": ready.count(False)}

    def drain(self, inbox: Inbox, http: HttpProcess | None = None) -> None:
        """Waits for a request to stop, and then until the calls in progress have ended.

        Args:
            inbox: Delivers the request.
            http: Is drained first, so that its requests arrive.
        """
        while not isinstance(request := inbox.wait(), StopRequest):
            pass
        log.info("draining", extra=request)
        grace, started = self.settings.grace_seconds, time.monotonic()
        end_after(grace + EXIT_SECONDS)
        if http is not None:
            http.drain()
        self.server.stop(max(0.0, grace - (time.monotonic() - started)))
        seconds = round(time.monotonic() - started, 3)
        log.info("drained", extra={"seconds": seconds, "grace_seconds": grace})

    def close(self) -> None:
        """Ends what is left of calls and runs. The last spans are sent."""
        self._stack.close()
        self.server.stop(0)
        self.metrics.refresh()
        self._recorder.close()


def resolve(settings: Settings) -> Settings:
    """The same settings with a provider that this machine has in place of auto. Logs the choice.

    Raises:
        ServerError: CUDA was asked for and cannot be used; the message gives the reason.
    """
    requested, chosen = settings.provider, Provider.CUDA
    if requested == "cpu":
        return settings
    try:
        details = {"device": cuda.find_device()}
    except ProviderError as error:
        if requested == "cuda":
            raise ServerError(f"--provider {requested}: {error}") from error
        chosen, details = Provider.CPU, {"reason": str(error)}
    log.info("execution provider", extra={"provider": chosen, "asked": requested, **details})
    return settings.model_copy(update={"provider": chosen.value})


def model_store(settings: Settings) -> ModelStore:
    """The model repository on disk.

    Raises:
        ServerError: The file of public keys cannot be read.
    """
    try:
        keys = read_public_keys(settings.proof_public_key) if settings.proof_public_key else ()
    except KeyFileError as error:
        raise ServerError(f"--proof-public-key: {error}") from error
    return ModelStore(
        settings.model_repository,
        settings.device,
        settings.max_tolerance,
        settings.version_policy,
        proof_keys=keys,
    )


def initial_models(settings: Settings, store: ModelStore) -> list[Key]:
    """Name and version of the artifacts that are loaded at startup.

    Raises:
        ServerError: The folder does not exist, or a model that is to be loaded does not exist.
    """
    if settings.model_control == "none":
        return store.artifacts()
    names = store.names()
    if settings.model_control == "explicit":
        requested = [name.strip() for name in settings.load_model.split(",") if name.strip()]
        if unknown := sorted(set(requested) - {ALL, *names}):
            raise ServerError(f"--load-model: the repository does not contain {', '.join(unknown)}")
        if ALL not in requested:
            names = sorted({*requested, *store.remembered()} & set(names))
    return [(name, version) for name in names for version in store.chosen(name)]


def load_models(
    settings: Settings, store: ModelStore, keys: Iterable[Key], inbox: Inbox
) -> Repository | None:
    """Loads models on another thread, so that this one can receive a request to stop; None if one came.

    Raises:
        ServerError: No model can be served, and none can be loaded later.
    """
    log.info("loading", extra={"model_repository": store.folder})
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    loading: Future[Repository] = loader.submit(lambda: Repository(store.load(*key) for key in keys))
    loading.add_done_callback(inbox.put)
    if isinstance(message := inbox.wait(), StopRequest):
        log.info("stopped while loading", extra=message)
        return None
    loader.shutdown()
    repository = loading.result()
    if settings.model_control == "none" and not any(isinstance(model, LoadedModel) for model in repository):
        raise ServerError(f"no model of {store.folder} can be served; the log gives the reasons")
    return repository


def rpc_options(settings: Settings) -> RpcOptions:
    """The options of the gRPC server."""
    return RpcOptions(
        host=settings.host,
        port=settings.port,
        unix_socket=settings.unix_socket,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_calls=settings.max_concurrent_calls,
        max_connections=settings.max_connections,
        message_timeout_seconds=settings.message_timeout_seconds,
        connection_age_seconds=settings.connection_age_seconds,
        allow_shared_memory=settings.allow_shared_memory,
        max_streams=max(1, settings.max_concurrent_calls // 2),
        share_port=settings.workers > 1,
        transport=settings.transport,
    )
