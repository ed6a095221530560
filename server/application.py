"""One server process: binds its ports, loads the models, serves, and drains when asked to stop."""

import gc
import logging
import time

from attention_serving.server.canary import Canary
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ChangeKind, ModelChange
from attention_serving.server.engine.models.loading import RepositoryError
from attention_serving.server.errors import LoadError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.identity import guard_of
from attention_serving.server.lifecycle import Lifecycle
from attention_serving.server.model_control import ControlMode
from attention_serving.server.models import load_models, model_control
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.request_log import recorder_of
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS, Inbox, StopRequest, end_after
from attention_serving.server.tls import current_certificates
from attention_serving.server.transport import TransportKind
from attention_serving.server.transport.options import RpcOptions

log = logging.getLogger(__name__)
# Objects that are made, beyond those that are freed, between two garbage collections.
YOUNG_OBJECTS = 50_000


def run(settings: Settings, lifecycle: Lifecycle, inbox: Inbox) -> None:
    """Serves until a `StopRequest` arrives, and returns when every accepted call has been answered.

    A request that arrives while models load ends the process at once with status 0: no call has been
    accepted, and a load in progress cannot be interrupted.

    Raises:
        IdentityError: The tokens file or the keys of JSON Web Tokens cannot be used.
        LoadError: The repository does not contain a model that can be served.
        BindError: An address cannot be listened on.
        TlsError: A certificate cannot be used.
    """
    metrics = Metrics()
    guard = guard_of(settings, metrics)
    certificates = current_certificates(settings.tls_files, metrics.tls)
    recorder = recorder_of(settings)
    metrics.configured(settings)
    server = RpcServer(
        rpc_options(settings), metrics, certificates=certificates, guard=guard, recorder=recorder
    )
    try:
        lifecycle.before_loading(server, metrics)
        repository = load_models(settings, inbox)
        metrics.loaded(repository)
        for model in repository:
            is_loaded = isinstance(model, LoadedModel)
            metrics.model_changed(ModelChange(model.name, ChangeKind.LOAD, is_loaded))
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
        metrics.refresh()
        if recorder is not None:
            recorder.close()
        lifecycle.close()
        if guard is not None:
            guard.close()
    log.info("stopped")


def rpc_options(settings: Settings) -> RpcOptions:
    """The options of the gRPC server."""
    return RpcOptions(
        host=settings.host,
        port=settings.port,
        unix_socket=settings.unix_socket,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_calls=settings.max_concurrent_calls,
        max_streams=max(1, settings.max_concurrent_calls // 2),
        max_connections=settings.max_connections,
        send_timeout_seconds=settings.send_timeout_seconds,
        receive_timeout_seconds=settings.receive_timeout_seconds,
        connection_age_seconds=settings.connection_age_seconds,
        allow_shared_memory=settings.allow_shared_memory,
        identity_share=settings.identity_share,
        share_port=settings.workers > 1,
        transport=TransportKind(settings.transport),
    )


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

    control = model_control(settings, engine.repository, changed, metrics.model_changed)
    canary = Canary(engine.repository, engine.load, control.withdraw, metrics.canary, settings.canary_seconds)
    # Numbers only: a model that is replaced must not be kept.
    ready = [isinstance(model, LoadedModel) for model in engine.repository]
    try:
        _freeze_loaded_objects()
        server.start(engine, control)
        if ControlMode(settings.model_control) is ControlMode.POLL:
            control.poll(settings.repository_poll_seconds)
        canary.start()
        lifecycle.serving(ready=ready.count(True), failed=ready.count(False))
        _wait_for_stop(inbox)
        end_after(settings.grace_seconds + EXIT_SECONDS)
        seconds = _drain(settings.grace_seconds, server, lifecycle)
        log.info("drained", extra={"seconds": round(seconds, 3), "grace_seconds": settings.grace_seconds})
    finally:
        canary.close()
        control.close()
        engine.close()


def _drain(grace_seconds: float, server: RpcServer, lifecycle: Lifecycle) -> float:
    """Returns the seconds that it took."""
    started = time.monotonic()
    lifecycle.draining()
    server.stop(max(0.0, grace_seconds - (time.monotonic() - started)))
    return time.monotonic() - started


def _freeze_loaded_objects() -> None:
    """Exempts what was loaded from garbage collection: it stays until the process ends.

    What requests allocate is freed by reference counting. The collector looks for cycles less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def _wait_for_stop(inbox: Inbox) -> None:
    while not isinstance(request := inbox.get(), StopRequest):
        pass
    log.info("draining", extra=request.fields)
