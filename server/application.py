"""The life of the process: load, listen, wait for a signal, drain, end."""

import gc
import logging
import signal
import threading
from types import FrameType
from typing import Protocol

from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.repository import Repository, RepositoryError, load_repository
from server.metrics import Metrics, MetricsServer
from server.rpc.server import RpcServer
from server.settings import Settings

log = logging.getLogger(__name__)


class Surroundings(Protocol):
    """What a server stands in: alone, or beside others under a supervisor."""

    def loaded(self, metrics: Metrics, stop: threading.Event) -> None:
        """The models are ready. Returns when the server may listen, or is to stop."""

    def serving(self, port: int, *, ready: int, failed: int) -> None:
        """The server listens, with so many models."""

    def close(self) -> None:
        """The server has answered all that it accepted."""


class Alone:
    """The only server of its port, with a metrics endpoint of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._endpoint: MetricsServer | None = None

    def loaded(self, metrics: Metrics, stop: threading.Event) -> None:  # noqa: ARG002 - waits for nobody
        """Shows the metrics.

        Raises:
            BindError: Their address cannot be listened on.
        """
        self._endpoint = metrics.serve(self._settings.host, self._settings.metrics_port)

    def serving(self, port: int, *, ready: int, failed: int) -> None:
        """Says where."""
        metrics_port = self._endpoint.port if self._endpoint else None
        fields = {"host": self._settings.host, "port": port, "metrics_port": metrics_port}
        log.info("serving", extra={**fields, "models": ready, "failed": failed})

    def close(self) -> None:
        """Shows the metrics no more."""
        if self._endpoint:
            self._endpoint.close()


def run(settings: Settings, surroundings: Surroundings | None = None) -> None:
    """Serves until SIGTERM or SIGINT, and returns when every accepted call has its answer.

    Raises:
        RepositoryError: The repository holds no model that can answer.
        BindError: An address cannot be listened on.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: _asked_to_stop(received, stop))
    log.info("loading", extra={"model_repository": settings.model_repository})
    repository = load_repository(settings.model_repository, settings.device)
    if stop.is_set():
        return
    if not any(isinstance(model, LoadedModel) for model in repository):
        raise RepositoryError(f"no model of {settings.model_repository} can answer; the log says why")
    _serve(settings, repository, surroundings or Alone(settings), stop)
    log.info("stopped")


def _serve(
    settings: Settings, repository: Repository, surroundings: Surroundings, stop: threading.Event
) -> None:
    metrics = Metrics()
    metrics.loaded(repository)
    engine = Engine(repository, settings.limits, metrics)
    rpc = RpcServer(settings.rpc, metrics)
    ready = sum(isinstance(model, LoadedModel) for model in repository)
    try:
        surroundings.loaded(metrics, stop)
        if stop.is_set():
            return
        _settle_memory()
        port = rpc.bind()
        rpc.start(engine)
        surroundings.serving(port, ready=ready, failed=len(list(repository)) - ready)
        stop.wait()
        seconds = rpc.stop(settings.grace_seconds)
        log.info("drained", extra={"seconds": f"{seconds:.3f}", "grace_seconds": settings.grace_seconds})
    finally:
        engine.close()
        surroundings.close()


def _settle_memory() -> None:
    """What was loaded stays until the end: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def _asked_to_stop(number: int, stop: threading.Event, _frame: FrameType | None = None) -> None:
    log.info("draining", extra={"signal": signal.Signals(number).name})
    stop.set()
