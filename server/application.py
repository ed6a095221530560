"""The life of the process: load, listen, wait for a signal, drain, end."""

import logging
import signal
import threading
from types import FrameType

from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.repository import RepositoryError, load_repository
from server.metrics import Metrics
from server.rpc.server import RpcServer
from server.settings import Settings

log = logging.getLogger(__name__)


def run(settings: Settings) -> None:
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
    ready = [model for model in repository if isinstance(model, LoadedModel)]
    if not ready:
        raise RepositoryError(f"no model of {settings.model_repository} can answer; the log says why")
    metrics = Metrics()
    metrics.loaded(repository)
    engine = Engine(repository, settings.limits, metrics)
    rpc = RpcServer(engine, settings.rpc, metrics)
    endpoint = metrics.serve(settings.host, settings.metrics_port)
    try:
        port = rpc.start()
        log.info(
            "serving",
            extra={
                "host": settings.host,
                "port": port,
                "metrics_port": endpoint.port,
                "models": len(ready),
                "failed": len(list(repository)) - len(ready),
            },
        )
        stop.wait()
        seconds = rpc.stop(settings.grace_seconds)
        log.info("drained", extra={"seconds": f"{seconds:.3f}", "grace_seconds": settings.grace_seconds})
    finally:
        engine.close()
        endpoint.close()
    log.info("stopped")


def _asked_to_stop(number: int, stop: threading.Event, _frame: FrameType | None = None) -> None:
    log.info("draining", extra={"signal": signal.Signals(number).name})
    stop.set()
