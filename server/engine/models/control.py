"""The life of the models of a server: loaded and proven beside those that serve, published, replaced.

`load` proves new versions before they take the place of the old ones in one step. Those serve no new requests
from then on, and are freed with their last request.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from attention_serving.artifact.names import NAME_PATTERN, is_model_name
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    UnsupportedError,
    quoted,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore, Signature, memory_shortfall
from attention_serving.server.engine.models.repository import FailedModel, Key, Model, Repository
from attention_serving.server.errors import ServerError
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)
UNLOADED = "unloaded"
# Files that failed for a transient reason are loaded again after 2, 4, 8 polls and so on; at most this many.
MAX_POLLS = 32
CONTROL_IS_OFF = "models are not loaded on request; start the server with --model-control explicit"


class ModelState(StrEnum):
    """What a version of a model is doing, in the words of the Open Inference Protocol."""

    READY = "READY"
    LOADING = "LOADING"
    UNAVAILABLE = "UNAVAILABLE"


class IndexEntry(NamedTuple):
    """One version of a model.

    Attributes:
        name: Name of the model.
        version: Its version.
        state: What it is doing.
        reason: Why, if the state does not say it.
    """

    name: str
    version: str
    state: ModelState
    reason: str = ""


class ChangeKind(StrEnum):
    """What happened to one version of a model.

    Attributes:
        LOAD: It is served, and was not served before.
        REPLACE: It is served in place of an artifact of the same version.
        UNLOAD: It is not served any more.
    """

    LOAD = "load"
    REPLACE = "replace"
    UNLOAD = "unload"


# Receives the name of a model of which a version changed or failed to, what happened or was to happen, and
# whether it did. A version that failed to load leaves what was served as it is.
Report: TypeAlias = Callable[[str, ChangeKind, bool], None]


class ModelControl:
    """Changes the models of one repository. One thread at a time may call `load`, `unload` and `poll_once`.

    Any thread may read the index, ask for a change, and take a model out of service.
    """

    def __init__(
        self,
        store: ModelStore,
        repository: Repository,
        changed: Callable[[], None] = lambda: None,
        report: Report = lambda *_: None,
        *,
        is_explicit: bool = False,
    ) -> None:
        """Begins with the models that the repository has, and starts no thread.

        Args:
            store: The artifacts on disk.
            repository: The models that are served.
            changed: Called after each change.
            report: Called for each version that changed, and for each that failed to load.
            is_explicit: Whether callers may ask for changes.
        """
        self.repository = repository
        self.is_explicit = is_explicit
        self._store, self._changed, self._report = store, changed, report
        # Of what was loaded last, by name and version. What failed is not tried again until it changes,
        # unless the failure is transient.
        self._signatures: dict[str, dict[str, Signature]] = {}
        for model in repository:
            signature = store.signature(model.name, model.version)
            if signature is not None and not _is_transient(model):
                self._signatures.setdefault(model.name, {})[model.version] = signature
        # Models that had changed on disk at the last poll: their files, and how many polls have seen these.
        self._pending: dict[str, tuple[dict[str, Signature], int]] = {}
        self._swapping = threading.Lock()
        # Versions that are being loaded, or that failed to, with the reason.
        self._states: dict[Key, IndexEntry] = {}
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._poller: PeriodicThread | None = None

    def request(self, change: Callable[[str], None], name: str) -> "Future[None]":
        """Makes a change that a caller asks for, after those that were asked for before.

        Args:
            change: `load` or `unload`.
            name: Name of the model.

        Returns:
            A future that resolves once the change is made; or with ModelNotReadyError, and nothing changed.

        Raises:
            InvalidRequestError: The name is not that of a model.
            UnsupportedError: Models are not loaded on request.
        """
        if not self.is_explicit:
            raise UnsupportedError(CONTROL_IS_OFF)
        if not is_model_name(name):
            raise InvalidRequestError("model_name", f"is {quoted(name)}; must match {NAME_PATTERN}")
        return self._requests.submit(self._change, change, name)

    def _change(self, change: Callable[[str], None], name: str) -> None:
        change(name)
        self._store.remember({model.name for model in self.repository})

    def poll(self, seconds: float) -> None:
        """Starts to poll the folder for changes, every so many seconds."""
        self._poller = PeriodicThread("poll", self.poll_once, seconds).start()

    def close(self) -> None:
        """Ends the threads. A change that is being made is finished."""
        self._requests.shutdown(cancel_futures=True)
        if self._poller is not None:
            self._poller.close()

    def poll_once(self) -> None:
        """Loads and unloads what changed before the last poll: what changed since may be half written."""
        try:
            changed = self.changed_on_disk()
        except (ServerError, OSError) as error:
            log.warning("repository not read", extra={"reason": str(error)})
            return
        pending, self._pending = self._pending, {}
        for name, signatures in changed.items():
            last_signatures, polls = pending.get(name, (None, 0))
            polls = polls + 1 if signatures == last_signatures else 1
            self._pending[name] = signatures, polls
            # The first poll waits for the second. Later ones are attempts again after a transient failure.
            if polls.bit_count() > 1 and polls % MAX_POLLS:
                continue
            try:
                self._withdraw_damaged(name)
                if polls == 1:
                    continue
                if self._store.chosen(name):
                    self.load(name, strict=False)
                else:
                    self.unload(name)
            except Exception:  # one model must not end the polling
                log.exception("model not changed", extra={"model": name})

    def _withdraw_damaged(self, name: str) -> None:
        """Takes the versions of a model out of service whose files have changed and are not a whole artifact.

        One that is whole replaces that which serves without a pause.
        """
        signatures = self._signatures.get(name, {})
        for version, model in self.repository.versions(name).items():
            is_changed = self._store.signature(name, version) != signatures.get(version)
            damage = self._store.damage(name, version) if is_changed else ""
            if damage and isinstance(model, LoadedModel) and self.withdraw(model, damage):
                signatures.pop(version, None)  # it is loaded again once it is whole

    def changed_on_disk(self) -> dict[str, dict[str, Signature]]:
        """The models whose artifacts are not those that were loaded last, and what is there by version.

        Incomplete artifacts wait.

        Raises:
            ServerError: The folder does not exist.
        """
        changed = dict[str, dict[str, Signature]]()
        for name in sorted({*self._store.names(), *self._signatures}):
            signatures = {
                version: signature for version, signature in self._store.signatures(name).items() if signature
            }
            if signatures != self._signatures.get(name, {}):
                changed[name] = signatures
        return changed

    def load(self, name: str, *, strict: bool = True) -> None:
        """Loads the versions of a model that its policy chooses; those that have not changed are kept.

        Args:
            name: Name of the model.
            strict: Whether nothing changes if one version fails. Otherwise the good ones are served, and the
                versions that serve now go on.

        Raises:
            ModelNotReadyError: The model does not exist, or a version failed and `strict` is set.
        """
        # Raised here, because an error refers to the variables of the function that raises it.
        if reason := self._load(name, strict=strict):
            raise ModelNotReadyError(reason)

    def _load(self, name: str, *, strict: bool) -> str:
        served, loaded = self.repository.versions(name), dict[str, Model]()
        signatures = self._store.signatures(name)
        if not signatures:
            return f"model {quoted(name)} does not exist in the repository"
        before = self._signatures.get(name, {})
        for version, signature in signatures.items():
            is_same = signature is not None and signature == before.get(version)
            if not (is_same and isinstance(served.get(version), LoadedModel)):
                loaded[version] = self._load_version(name, version, signature)
        failures = [model for model in loaded.values() if isinstance(model, FailedModel)]
        for failed in failures:
            was_served = isinstance(served.get(failed.version), LoadedModel)
            kind = ChangeKind.REPLACE if was_served else ChangeKind.LOAD
            self._report(name, kind, False)  # noqa: FBT003 - as the type says
        if failures and strict:
            self._record_failures(failures)
            return f"model {name!r} version {failures[0].version} failed to load: {failures[0].reason}"
        with self._swapping:
            kept = {
                version: model  # it may have been taken out of service meanwhile
                for version, model in self.repository.versions(name).items()
                if isinstance(served[version], LoadedModel)
                and (failures or version in signatures)
                and not isinstance(loaded.get(version), LoadedModel)
            }
            self._signatures[name] = {
                version: signature
                for version, signature in signatures.items()
                if signature and not _is_transient(loaded.get(version))
            }
            self._swap(name, loaded | kept, failures)
        return ""

    def _load_version(self, name: str, version: str, signature: Signature | None) -> Model:
        if signature is not None and (reason := memory_shortfall(signature)):
            return FailedModel(name, version, reason, is_transient=True)
        self._states[name, version] = IndexEntry(name, version, ModelState.LOADING)
        model = self._store.load(name, version)
        self._states.pop((name, version), None)
        return model

    def unload(self, name: str) -> None:
        """Unloads all versions of a model.

        Raises:
            ModelNotReadyError: None is loaded.
        """
        if not self.repository.versions(name):
            raise ModelNotReadyError(f"model {quoted(name)} is not loaded")
        with self._swapping:
            self._signatures[name] = {}
            self._swap(name, {})

    def _swap(self, name: str, now: Mapping[str, Model], failures: Iterable[FailedModel] = ()) -> None:
        """Puts versions of a model in place of those that it has."""
        before = self.repository.versions(name)
        self.repository.replace(name, now)
        self._states = {key: entry for key, entry in self._states.items() if key[0] != name}
        self._record_failures(failures)
        for version in {**before, **now}:
            old, new = before.get(version), now.get(version)
            was_served, is_served = isinstance(old, LoadedModel), isinstance(new, LoadedModel)
            if old is new or not (was_served or is_served):
                continue
            if isinstance(old, LoadedModel):
                _log_when_freed(old)
            kind = ChangeKind.REPLACE if was_served else ChangeKind.LOAD
            self._report(name, kind if is_served else ChangeKind.UNLOAD, True)  # noqa: FBT003 - as above
        versions = [model.version for model in self.repository.loaded_models if model.name == name]
        log.info("models changed", extra={"model": name, "versions": versions})
        self._changed()

    def withdraw(self, model: LoadedModel, reason: str) -> bool:
        """Takes a model out of service, whatever change is being made; loading it again brings it back.

        Requests that have found it are still answered by it.

        Args:
            model: A model of the repository.
            reason: Why, for callers: without a path of this machine.

        Returns:
            Whether the model was in service.
        """
        key = model.name, model.version
        with self._swapping:
            versions = self.repository.versions(model.name)
            if versions.get(model.version) is not model:
                return False
            failed = FailedModel(*key, reason, is_withdrawn=True, aliases=model.manifest.aliases)
            self.repository.replace(model.name, {**versions, model.version: failed})
            self._states.pop(key, None)
            fields = {"model": model.name, "version": model.version, "reason": reason}
            log.error("model taken out of service", extra=fields)
            _log_when_freed(model)
            self._changed()
        return True

    def _record_failures(self, failures: Iterable[FailedModel]) -> None:
        for model in failures:
            key = model.name, model.version
            self._states[key] = IndexEntry(*key, ModelState.UNAVAILABLE, model.reason)

    def index(self) -> list[IndexEntry]:
        """Every version in the repository or on disk, sorted by name and version.

        While the folder cannot be read, only those that are served or failed to load.
        """
        entries = dict[Key, IndexEntry]()
        with suppress(ServerError, OSError):
            for key in self._store.artifacts():
                entries[key] = IndexEntry(*key, ModelState.UNAVAILABLE, UNLOADED)
        for model in self.repository:
            key, is_ready = (model.name, model.version), isinstance(model, LoadedModel)
            state = ModelState.READY if is_ready else ModelState.UNAVAILABLE
            entries[key] = IndexEntry(*key, state, "" if isinstance(model, LoadedModel) else model.reason)
        for key, entry in list(self._states.items()):
            serving = key in entries and entries[key].state is ModelState.READY
            entries[key] = IndexEntry(*key, ModelState.READY, entry.reason) if serving else entry
        return [entries[key] for key in sorted(entries, key=lambda key: (key[0], int(key[1])))]


def _is_transient(model: Model | None) -> bool:
    return isinstance(model, FailedModel) and model.is_transient


def _log_when_freed(model: LoadedModel) -> None:
    """Logs, on any thread, when the last request of a model has ended that is not served any more."""
    fields = {"model": model.name, "version": model.version}
    weakref.finalize(model, log.info, "model freed", extra=fields).atexit = False
