"""One server process: loads the models, serves them, and drains when it is asked to stop."""

import gc
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
from attention_serving.server.lifecycle import EXIT_SECONDS, Inbox, StopRequest, end_after
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.process.audit import Audit
from attention_serving.server.process.canary import Canary
from attention_serving.server.process.grpc_server import GrpcServer
from attention_serving.server.process.supervision import HttpProcess, private_socket
from attention_serving.server.security.tls import watch
from attention_serving.server.settings import Settings

log = logging.getLogger(__name__)
# Allocated objects, minus those that are freed, between two garbage collections.
GC_THRESHOLD = 50_000
# The value of `load_model` for all models.
ALL = "*"


class Application:
    """The parts of a server process, and the steps of its life: `bind`, `load`, `start`, `drain` and `close`.

    A worker is bound after `load`, and any other process before it.

    Attributes:
        settings: Its settings, with a provider that this machine has.
        certificates: Give the certificate of the next handshake; None without TLS.
        guard: Authenticates and authorises calls; None allows everything.
        registry: The metrics.
        refusals: The counter of what the HTTP process refuses by itself, by reason.
        server: The gRPC server.
    """

    def __init__(self, settings: Settings, inbox: Inbox) -> None:
        """Loads nothing yet.

        Args:
            settings: The settings of the process.
            inbox: Delivers the request to stop.

        Raises:
            ServerError: CUDA, a certificate, the tokens file or keys of JSON Web Tokens cannot be used; or
                there is no repository, or it lacks a model that is to be loaded.
        """
        self.settings = settings = resolve(settings)
        self._inbox = inbox
        self._store = model_store(settings)
        self._models = initial_models(settings, self._store)
        self._metrics = metrics = Metrics()
        self.registry, self.refusals, self.refresh = metrics.registry, metrics.refusals, metrics.refresh
        metrics.loading(self._models)
        files = settings.tls_files
        self.certificates = watch(files, metrics.reloaded) if files else None
        if self.certificates is not None:
            metrics.certificates_in_use(self.certificates.value)
        self._recorder = Recorder(settings.log_requests, host=settings.host, port=settings.port)
        metrics.configured(settings, cuda.find_device() if settings.provider == "cuda" else None)
        self.guard = settings.guard(metrics.reloaded)
        self.server = GrpcServer(
            settings,
            metrics.events,
            certificates=self.certificates,
            guard=self.guard,
            recorder=self._recorder if self._recorder.is_on else None,
        )
        # What is closed before the gRPC server.
        self._stack = ExitStack()

    def pids(self) -> dict[str, int | None]:
        """The id of each process by its name: of this one."""
        return {"server": os.getpid()}

    def bind(self, folder: Path, worker: int = 0) -> int:
        """Binds the addresses; returns the port.

        Args:
            folder: A folder for a socket, which only this user can read.
            worker: The number of the worker.

        Raises:
            ServerError: An address is in use, or cannot be used on this machine.
        """
        is_http_on = self.settings.http_port is not None
        return self.server.bind(private_socket(folder, worker) if is_http_on else None)

    def load(self) -> bool:
        """Loads the models; returns False if the process was asked to stop meanwhile.

        Raises:
            ServerError: The repository does not contain a model that can be served.
        """
        settings, metrics, server = self.settings, self._metrics, self.server
        repository = load_models(settings, self._store, self._models, self._inbox)
        if repository is None:
            return False
        self._stack.callback(repository.close)
        metrics.loaded(repository)
        for model in repository:
            metrics.model_changed(model.name, ChangeKind.LOAD, isinstance(model, LoadedModel))
        self._engine = engine = Engine(
            repository,
            settings.limits,
            metrics.events,
            spin_seconds=settings.spin_seconds,
            parallel_runs=settings.device.parallel_runs,
            computing_runs=settings.device.computing_runs,
            context_folder=settings.context_folder,
        )
        self._stack.callback(engine.close)
        metrics.watch(engine.load, server.load)

        def changed() -> None:
            metrics.loaded(repository)
            server.show_models()

        is_explicit = settings.model_control == "explicit"
        self._control = control = ModelControl(
            self._store, repository, changed, metrics.model_changed, is_explicit=is_explicit
        )
        self._stack.callback(control.close)
        if seconds := settings.canary_seconds:
            self._stack.callback(Canary(repository, control.withdraw, metrics, seconds).start().close)
        if fraction := settings.audit_fraction:
            self._stack.callback(Audit(engine, control.withdraw, metrics, fraction).start().close)
        return True

    def start(self) -> dict[str, int]:
        """Begins to answer calls; returns the numbers of ready and of failed models, for the log."""
        repository = self._engine.repository
        ready, count = len(repository.loaded_models), len(list(repository))
        # What was loaded is exempt from garbage collection: it stays until the process ends. What requests
        # allocate is freed by reference counting, so that the collector looks for cycles less often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        self.server.start(self._engine, self._control)
        if self.settings.model_control == "poll":
            self._control.poll(self.settings.repository_poll_seconds)
        return {"models": ready, "failed": count - ready}

    def drain(self, http: HttpProcess | None = None) -> None:
        """Waits for a request to stop, and then until the calls in progress have ended.

        Args:
            http: Is drained first, so that its requests arrive.
        """
        while not isinstance(request := self._inbox.wait(), StopRequest):
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
        self.refresh()
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
        device = cuda.find_device()
        details = {"device": device.name, "uuid": device.uuid}
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
    folder, device, policy = settings.model_repository, settings.device, settings.version_policy
    try:
        keys = read_public_keys(settings.proof_public_key) if settings.proof_public_key else ()
    except KeyFileError as error:
        raise ServerError(f"--proof-public-key: {error}") from error
    return ModelStore(folder, device, settings.max_tolerance, policy, proof_keys=keys)


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
    loading: Future[Repository] = loader.submit(
        lambda: Repository((store.load(*key) for key in keys), settings.alias, settings.model_id)
    )
    loading.add_done_callback(inbox.put)
    if isinstance(message := inbox.wait(), StopRequest):
        log.info("stopped while loading", extra=message)
        return None
    loader.shutdown()
    repository = loading.result()
    if settings.model_control != "explicit" and not repository.loaded_models:
        problem = f"no model of {store.folder} can be served; the log gives the reasons"
        if settings.model_control == "none":
            raise ServerError(problem)
        log.warning("not ready", extra={"reason": problem if any(repository) else store.absence})
    return repository
