"""Loads and unloads models while the server runs: on request, or when the repository changes on disk."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from attention_serving.artifact.names import NAME_PATTERN, is_model_name
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    UnsupportedError,
    quoted,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import IndexEntry, RepositoryControl
from attention_serving.server.engine.models.store import RepositoryError, Signature
from attention_serving.server.periodic import PeriodicThread
from attention_serving.server.steps import Step, StepRequest

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


# Asks every process of the service, this one included, to take a step. Returns their replies: why they cannot
# take it, or nothing. Raises ConnectionError if the others cannot be asked.
Ask = Callable[[StepRequest], list[str]]


class ModelControl:
    """Makes the changes that callers ask for, one after the other, in every process or in none."""

    def __init__(self, control: RepositoryControl, mode: ControlMode, ask: Ask | None = None) -> None:
        """Starts no thread yet.

        Args:
            control: Makes changes in this process.
            mode: When models are loaded.
            ask: Asks all processes of the service; None for this one alone.
        """
        self._control = control
        self._mode = mode
        self._ask = ask or (lambda request: [self.take(request)])
        self._taking = threading.Lock()
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
        return self._request(Step.LOAD, name)

    def unload(self, name: str) -> "Future[None]":
        """Unloads all versions of a model; otherwise as `load`."""
        return self._request(Step.UNLOAD, name)

    def withdraw(self, model: LoadedModel, reason: str) -> bool:
        """Takes a model out of service in this process; returns whether it was in service."""
        return self._control.withdraw(model, reason)

    def take(self, request: StepRequest) -> str:
        """Takes a step of a change in this process. Returns why it cannot be taken, or nothing."""
        with self._taking:
            match request.step:
                case Step.LOAD:
                    return self._control.prepare_load(request.number, request.name)
                case Step.UNLOAD:
                    return self._control.prepare_unload(request.number, request.name)
                case Step.COMMIT:
                    self._control.commit(request.number)
                case Step.ABORT:
                    self._control.abort(request.number)
        return ""

    def poll(self, seconds: float) -> None:
        """Starts to look for changes on disk, every so many seconds."""
        self._poller = PeriodicThread("poll", self._look, seconds)
        self._poller.start()

    def close(self) -> None:
        """Ends the threads. A change that is being made is finished."""
        self._requests.shutdown(cancel_futures=True)
        if self._poller is not None:
            self._poller.close()

    def _request(self, step: Step, name: str) -> "Future[None]":
        if not self.is_explicit:
            raise UnsupportedError(CONTROL_IS_OFF)
        if not is_model_name(name):
            raise InvalidRequestError("model_name", f"is {quoted(name)}; must match {NAME_PATTERN}")
        return self._requests.submit(self._change, step, name)

    def _change(self, step: Step, name: str) -> None:
        number = uuid4().hex
        try:
            refusals = [reply for reply in self._ask(StepRequest(step, number, name)) if reply]
            final = Step.ABORT if refusals else Step.COMMIT
            self._ask(StepRequest(final, number, name))
        except ConnectionError as error:
            raise ModelNotReadyError(f"model {name!r} cannot be changed now: {error}") from error
        if refusals:
            raise ModelNotReadyError(refusals[0])
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
        number = uuid4().hex
        try:
            with self._taking:
                if self._control.store.chosen(name):
                    self._control.prepare_load(number, name, strict=False)
                else:
                    self._control.prepare_unload(number, name)
                self._control.commit(number)
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
