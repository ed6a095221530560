"""Which models a process loads when it starts."""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Key, Repository
from attention_serving.server.errors import ServerError
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import Inbox, StopRequest, end

log = logging.getLogger(__name__)
ALL = "*"


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
        asked = [name.strip() for name in settings.load_model.split(",") if name.strip()]
        if unknown := sorted(set(asked) - {ALL, *names}):
            raise ServerError(f"--load-model: the repository does not contain {', '.join(unknown)}")
        if ALL not in asked:
            names = sorted({*asked, *store.remembered()} & set(names))
    return [(name, version) for name in names for version in store.chosen(name)]


def load_models(settings: Settings, store: ModelStore, keys: Iterable[Key], inbox: Inbox) -> Repository:
    """Loads models on another thread, so that this one can receive a request to stop, which ends the process.

    Raises:
        ServerError: No model can be served, and none can be loaded later.
    """
    log.info("loading", extra={"model_repository": store.folder})
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    loading: Future[Repository] = loader.submit(lambda: Repository(store.load(*key) for key in keys))
    loading.add_done_callback(inbox.put)
    if isinstance(message := inbox.wait(), StopRequest):
        log.info("stopped while loading", extra=message)
        end(0)
    loader.shutdown()
    repository = loading.result()
    if settings.model_control == "none" and not any(isinstance(model, LoadedModel) for model in repository):
        raise ServerError(f"no model of {store.folder} can be served; the log gives the reasons")
    return repository
