"""Loads and unloads models while the server runs: on request, or when the repository changes on disk."""

import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from attention_serving.artifact.names import NAME_PATTERN, is_model_name
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    UnsupportedError,
    quoted,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, RepositoryControl
from attention_serving.server.engine.models.loading import RepositoryError, Signature
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
