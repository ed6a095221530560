"""Which models a process loads when it starts, and how they change while it serves."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelChange, RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore, RepositoryError
from attention_serving.server.engine.models.repository import Key, Repository
from attention_serving.server.errors import LoadError
from attention_serving.server.model_control import ALL, ControlMode, ModelControl, read_loaded
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import Inbox, StopRequest, end

log = logging.getLogger(__name__)


def model_store(settings: Settings) -> ModelStore:
    """The model repository on disk.

    Raises:
        LoadError: The file of public keys cannot be read.
    """
    try:
        keys = read_public_keys(settings.proof_public_key) if settings.proof_public_key else ()
    except KeyFileError as error:
        raise LoadError(f"--proof-public-key: {error}") from error
    return ModelStore(
        settings.model_repository,
        settings.device,
        settings.max_tolerance,
        settings.version_policy,
        proof_keys=keys,
        max_golden_bytes=settings.max_golden_bytes,
    )


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


def load_models(settings: Settings, inbox: Inbox) -> Repository:
    """Loads the models on another thread, so that this one can receive a request to stop.

    A request to stop ends the process.

    Raises:
        RepositoryError: No model can be served, and none can be loaded later.
    """
    log.info("loading", extra={"model_repository": settings.model_repository})
    store = model_store(settings)
    keys = initial_models(settings, store)
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    loading: Future[Repository] = loader.submit(lambda: Repository(store.load(*key) for key in keys))
    loading.add_done_callback(inbox.put)
    if isinstance(message := inbox.get(), StopRequest):
        log.info("stopped while loading", extra=message.fields)
        end(0)
    loader.shutdown()
    repository = loading.result()
    is_fixed = ControlMode(settings.model_control) is ControlMode.NONE
    if is_fixed and not any(isinstance(model, LoadedModel) for model in repository):
        raise RepositoryError(
            f"no model of {settings.model_repository} can be served; the log gives the reasons"
        )
    return repository


def model_control(
    settings: Settings,
    repository: Repository,
    changed: Callable[[], None],
    report: Callable[[ModelChange], None],
) -> ModelControl:
    """Changes the models of this process.

    Args:
        settings: When models change.
        repository: The models that are served.
        changed: Called after each change.
        report: Called for each version that changed, and for each that failed to load.
    """
    control = RepositoryControl(model_store(settings), repository, changed, report)
    return ModelControl(control, ControlMode(settings.model_control))
