"""Which models a process loads when it starts, and how they change while it serves."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.artifact.names import NAME_PATTERN, is_model_name
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    UnsupportedError,
    quoted,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, ModelChange, RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore, RepositoryError, Signature
from attention_serving.server.engine.models.repository import Key, Repository
from attention_serving.server.errors import LoadError
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import Inbox, StopRequest, end
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)
STATE_FILE = ".loaded-models.json"
ALL = "*"
CONTROL_IS_OFF = "models are not loaded on request; start the server with --model-control explicit"


class ControlMode(StrEnum):
    """When models are loaded and unloaded, with the names and meanings of Triton's model control modes."""

    NONE = "none"
    """All at startup, and never again."""
    POLL = "poll"
    """All at startup, and when the repository changes."""
    EXPLICIT = "explicit"
    """At startup those that are named, and then on request."""


class ModelControl:
    """Makes the changes that callers ask for, or that polling finds, one after the other."""

    def __init__(self, control: RepositoryControl, mode: ControlMode) -> None:
        """Starts no thread yet.

        Args:
            control: Makes the changes.
            mode: When models are loaded.
        """
        self._control = control
        self._mode = mode
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._poller: PeriodicThread | None = None
        # The models that had changed on disk at the last look, and what was there.
        self._seen: dict[str, dict[str, Signature]] = {}

    @property
    def is_explicit(self) -> bool:
        """Whether models are loaded and unloaded on request."""
        return self._mode is ControlMode.EXPLICIT

    def index(self) -> list[IndexEntry]:
        """Every version in the repository or on disk."""
        return self._control.index()

    def load(self, name: str) -> "Future[None]":
        """Loads a model, or loads it again if its artifact has changed.

        Returns:
            A future that resolves once the model is served; or with ModelNotReadyError, and nothing changed.

        Raises:
            InvalidRequestError: The name is not that of a model.
            UnsupportedError: Models are not loaded on request.
        """
        return self._request(self._control.load, name)

    def unload(self, name: str) -> "Future[None]":
        """Unloads all versions of a model; otherwise as `load`."""
        return self._request(self._control.unload, name)

    def withdraw(self, model: LoadedModel, reason: str) -> bool:
        """Takes a model out of service in this process; returns whether it was in service."""
        return self._control.withdraw(model, reason)

    def poll(self, seconds: float) -> None:
        """Starts to look for changes on disk, every so many seconds."""
        self._poller = PeriodicThread("poll", self._look, seconds)
        self._poller.start()

    def close(self) -> None:
        """Ends the threads. A change that is being made is finished."""
        self._requests.shutdown(cancel_futures=True)
        if self._poller is not None:
            self._poller.close()

    def _request(self, change: Callable[[str], None], name: str) -> "Future[None]":
        if not self.is_explicit:
            raise UnsupportedError(CONTROL_IS_OFF)
        if not is_model_name(name):
            raise InvalidRequestError("model_name", f"is {quoted(name)}; must match {NAME_PATTERN}")
        return self._requests.submit(self._change, change, name)

    def _change(self, change: Callable[[str], None], name: str) -> None:
        change(name)
        self._remember()

    def _remember(self) -> None:
        names = sorted({model.name for model in self._control.repository})
        try:
            write_loaded(self._control.store.folder, names)
        except OSError as error:
            log.warning("loaded models not remembered", extra={"reason": error.strerror})

    def _look(self) -> None:
        try:
            changed = self._control.changed_on_disk()
        except (RepositoryError, OSError) as error:
            log.warning("repository not read", extra={"reason": str(error)})
            return
        # Artifacts that differ from the last look may still be written.
        for name, found in changed.items():
            if self._seen.get(name) == found:
                self._reload(name)
        self._seen = changed

    def _reload(self, name: str) -> None:
        try:
            if self._control.store.chosen(name):
                self._control.load(name, strict=False)
            else:
                self._control.unload(name)
        except ModelNotReadyError as error:  # it was removed in the meantime
            log.info("model not changed", extra={"model": name, "reason": error.message})
        except Exception:  # one model must not end the polling
            log.exception("model not changed", extra={"model": name})


def read_loaded(folder: Path) -> list[str]:
    """The models that were loaded on request when the last server of a repository ended; none if unknown."""
    try:
        found = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def write_loaded(folder: Path, names: Iterable[str]) -> None:
    """Remembers the models that are loaded.

    Raises:
        OSError: The repository cannot be written to.
    """
    file = folder / STATE_FILE
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(list(names)) + "\n")
    temporary.replace(file)


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


@contextmanager
def _load_errors() -> Iterator[None]:
    """Faults of the repository as faults of the process."""
    try:
        yield
    except RepositoryError as error:
        raise LoadError(str(error)) from error


@_load_errors()
def initial_models(settings: Settings, store: ModelStore) -> list[Key]:
    """Name and version of the artifacts that are loaded at startup.

    Raises:
        LoadError: The folder does not exist, or a model that is to be loaded does not exist.
    """
    names, mode = store.names(), ControlMode(settings.model_control)
    if mode is ControlMode.NONE:
        return store.artifacts(names)
    if mode is ControlMode.EXPLICIT:
        asked = [name.strip() for name in settings.load_model.split(",") if name.strip()]
        if unknown := sorted(set(asked) - {ALL, *names}):
            raise LoadError(f"--load-model: the repository does not contain {', '.join(unknown)}")
        if ALL not in asked:
            names = sorted({*asked, *read_loaded(store.folder)} & set(names))
    return [(name, version) for name in names for version in store.chosen(name)]


@_load_errors()
def load_models(settings: Settings, store: ModelStore, keys: Iterable[Key], inbox: Inbox) -> Repository:
    """Loads models on another thread, so that this one can receive a request to stop, which ends the process.

    Raises:
        LoadError: No model can be served, and none can be loaded later.
    """
    log.info("loading", extra={"model_repository": store.folder})
    loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
    loading: Future[Repository] = loader.submit(lambda: Repository(store.load(*key) for key in keys))
    loading.add_done_callback(inbox.put)
    if isinstance(message := inbox.get(), StopRequest):
        log.info("stopped while loading", extra=message.fields)
        end(0)
    loader.shutdown()
    repository = loading.result()
    if settings.model_control == "none" and not any(isinstance(model, LoadedModel) for model in repository):
        raise LoadError(f"no model of {store.folder} can be served; the log gives the reasons")
    return repository


def model_control(
    settings: Settings,
    store: ModelStore,
    repository: Repository,
    changed: Callable[[], None],
    report: Callable[[ModelChange], None],
) -> ModelControl:
    """Changes the models of this process.

    Args:
        settings: When models change.
        store: The model repository on disk.
        repository: The models that are served.
        changed: Called after each change.
        report: Called for each version that changed, and for each that failed to load.
    """
    control = RepositoryControl(store, repository, changed, report)
    return ModelControl(control, ControlMode(settings.model_control))
