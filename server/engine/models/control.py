"""Changes the models of a running server: loads versions beside those that serve, and swaps them in one step.

A change has two phases, so that several processes make it together or not at all: `prepare` loads and proves
the new versions, and `commit` puts them in place of the old ones, which then serve no new requests and are
freed once their last request has ended.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from attention_serving.server.engine.errors import quoted
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Key, Model, Repository
from attention_serving.server.engine.models.store import ModelStore, RepositoryError, Signature

log = logging.getLogger(__name__)
INCOMPLETE = "the artifact is incomplete: it has no manifest"
UNLOADED = "unloaded"


class ModelState(StrEnum):
    """What a version of a model is doing, in the words of the Open Inference Protocol."""

    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class IndexEntry:
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
    """What happened to one version of a model."""

    LOAD = "load"
    """It is served, and was not served before."""
    REPLACE = "replace"
    """It is served in place of an artifact of the same version."""
    UNLOAD = "unload"
    """It is not served any more."""


@dataclass(frozen=True)
class ModelChange:
    """One version of a model changed, or failed to.

    Attributes:
        name: Name of the model.
        kind: What happened, or was to happen.
        succeeded: Whether it did. A version that failed to load leaves what was served as it is.
    """

    name: str
    kind: ChangeKind
    succeeded: bool


@dataclass
class _Prepared:
    """A change that is prepared.

    Attributes:
        name: Name of the model.
        kept: The versions that stay as they are then: they may be taken out of service meanwhile.
        loaded: Models that take the place of their versions.
        failures: Versions that failed to load.
        signatures: What is on disk, by version.
    """

    name: str
    kept: set[str] = field(default_factory=set)
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    failures: list[FailedModel] = field(default_factory=list)
    signatures: dict[str, Signature] = field(default_factory=dict)


class RepositoryControl:
    """Makes changes of one repository. One thread at a time prepares and commits.

    Any thread may look, and take a model out of service.
    """

    def __init__(
        self,
        store: ModelStore,
        repository: Repository,
        changed: Callable[[], None] = lambda: None,
        check_memory: Callable[[str, str], str] = lambda _name, _version: "",
        report: Callable[[ModelChange], None] = lambda _change: None,
    ) -> None:
        """Begins with the models that the repository has.

        Args:
            store: The artifacts on disk.
            repository: The models that are served.
            changed: Called after each change.
            check_memory: Takes name and version of an artifact. Returns why there is too little memory to
                load it; empty if there is enough.
            report: Called for each version that changed, and for each that failed to load.
        """
        self.store = store
        self.repository = repository
        self._changed = changed
        self._check_memory = check_memory
        self._report = report
        # Of what was loaded last, by name and version. What failed is not tried again until it changes.
        self._signatures: dict[str, dict[str, Signature]] = {}
        for model in repository:
            if (signature := store.signature(model.name, model.version)) is not None:
                self._signatures.setdefault(model.name, {})[model.version] = signature
        self._prepared: dict[str, _Prepared] = {}
        self._swapping = threading.Lock()
        # Versions that are being loaded or freed, or that are not served, with the reason.
        self._states: dict[Key, IndexEntry] = {}

    def prepare_load(self, number: str, name: str, *, strict: bool = True) -> str:
        """Loads the versions of a model that its policy chooses; those that have not changed are kept.

        Args:
            number: Identifies the change.
            name: Name of the model.
            strict: Whether one version that fails makes the change fail. Otherwise the good ones are served,
                and the versions that serve now go on.

        Returns:
            Why the change cannot be made; empty if it can.
        """
        change, served = _Prepared(name), self.repository.versions(name)
        wanted = self.store.chosen(name)
        if not wanted:
            return f"model {quoted(name)} does not exist in the repository"
        for version in wanted:
            self._prepare_version(change, version, served.get(version))
        for failed in change.failures:
            was_served = isinstance(served.get(failed.version), LoadedModel)
            kind = ChangeKind.REPLACE if was_served else ChangeKind.LOAD
            self._report(ModelChange(name, kind, succeeded=False))
        if change.failures and strict:
            failed = change.failures[0]
            self._note_failures(change)
            return f"model {name!r} version {failed.version} failed to load: {failed.reason}"
        if change.failures:
            change.kept |= {version for version, model in served.items() if isinstance(model, LoadedModel)}
        self._keep(number, change)
        return ""

    def prepare_unload(self, number: str, name: str) -> str:
        """Prepares that no version of a model is served. Returns why it cannot be done; empty if it can."""
        if not self.repository.versions(name):
            return f"model {quoted(name)} is not loaded"
        self._keep(number, _Prepared(name))
        return ""

    def abort(self, number: str) -> None:
        """Drops a prepared change. Does nothing if there is none of that number."""
        self._prepared.pop(number, None)

    def commit(self, number: str) -> None:
        """Makes a prepared change. Does nothing if there is none of that number."""
        change = self._prepared.pop(number, None)
        if change is not None:
            with self._swapping:
                self._commit(change)

    def withdraw(self, model: LoadedModel, reason: str) -> bool:
        """Takes a model out of service, whatever change is being prepared; loading it again brings it back.

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
            failed = FailedModel(*key, reason, is_withdrawn=True)
            self.repository.replace(model.name, {**versions, model.version: failed})
            self._states.pop(key, None)
            self._free(model, is_replaced=True)
            self._changed()
        return True

    def _commit(self, change: _Prepared) -> None:
        name, served = change.name, self.repository.versions(change.name)
        now: dict[str, Model] = {failed.version: failed for failed in change.failures}
        now |= {version: served[version] for version in change.kept} | change.loaded
        self.repository.replace(name, now)
        self._signatures[name] = change.signatures
        for key in [key for key in list(self._states) if key[0] == name]:
            self._states.pop(key, None)
        self._note_failures(change)
        for version, model in served.items():
            if isinstance(model, LoadedModel) and now.get(version) is not model:
                self._free(model, is_replaced=version in change.loaded)
        versions = sorted(change.kept | change.loaded.keys(), key=int)
        log.info("models changed", extra={"model": name, "versions": versions})
        self._report_changes(name, served, now)
        self._changed()

    def index(self) -> list[IndexEntry]:
        """Every version in the repository or on disk, sorted by name and version.

        While the folder cannot be read, only those that are served or failed to load.
        """
        found = dict[Key, IndexEntry]()
        with suppress(RepositoryError, OSError):
            for name in self.store.names():
                for version in self.store.chosen(name):
                    found[name, version] = IndexEntry(name, version, ModelState.UNAVAILABLE, UNLOADED)
        found |= {(entry.name, entry.version): entry for entry in index_of(self.repository)}
        for key, entry in list(self._states.items()):
            serving = key in found and found[key].state is ModelState.READY
            found[key] = IndexEntry(*key, ModelState.READY, entry.reason) if serving else entry
        return [found[key] for key in sorted(found, key=lambda key: (key[0], int(key[1])))]

    def changed_on_disk(self) -> dict[str, dict[str, Signature]]:
        """The models whose artifacts are not those that were loaded last, and what is there by version.

        Incomplete artifacts wait.

        Raises:
            RepositoryError: The folder does not exist.
        """
        names = sorted({*self.store.names(), *self._signatures})
        now = {name: self._on_disk(name) for name in names}
        return {name: found for name, found in now.items() if found != self._signatures.get(name, {})}

    def _on_disk(self, name: str) -> dict[str, Signature]:
        found = {version: self.store.signature(name, version) for version in self.store.chosen(name)}
        return {version: signature for version, signature in found.items() if signature is not None}

    def _report_changes(self, name: str, before: Mapping[str, Model], after: Mapping[str, Model]) -> None:
        for version in {**before, **after}:
            old, new = before.get(version), after.get(version)
            if old is new:
                continue
            if isinstance(new, LoadedModel):
                kind = ChangeKind.REPLACE if isinstance(old, LoadedModel) else ChangeKind.LOAD
                self._report(ModelChange(name, kind, succeeded=True))
            elif isinstance(old, LoadedModel):
                self._report(ModelChange(name, ChangeKind.UNLOAD, succeeded=True))

    def _keep(self, number: str, change: _Prepared) -> None:
        """Keeps a prepared change, in place of one that was never made: its process may have ended."""
        for other in [other for other, own in self._prepared.items() if own.name == change.name]:
            del self._prepared[other]
        self._prepared[number] = change

    def _prepare_version(self, change: _Prepared, version: str, served: Model | None) -> None:
        key = change.name, version
        signature = self.store.signature(*key)
        if signature is None:
            change.failures.append(FailedModel(*key, INCOMPLETE))
            return
        change.signatures[version] = signature
        if isinstance(served, LoadedModel) and signature == self._signatures.get(change.name, {}).get(
            version
        ):
            change.kept.add(version)
            return
        if reason := self._check_memory(*key):
            change.failures.append(FailedModel(*key, reason))
            return
        self._states[key] = IndexEntry(*key, ModelState.LOADING)
        model = self.store.load(*key)
        self._states.pop(key, None)
        if isinstance(model, LoadedModel):
            change.loaded[version] = model
        else:
            change.failures.append(model)

    def _note_failures(self, change: _Prepared) -> None:
        for failed in change.failures:
            key = failed.name, failed.version
            self._states[key] = IndexEntry(*key, ModelState.UNAVAILABLE, failed.reason)

    def _free(self, model: LoadedModel, *, is_replaced: bool) -> None:
        key = model.name, model.version
        if not is_replaced:
            self._states[key] = IndexEntry(*key, ModelState.UNLOADING)
        # After its last request.
        weakref.finalize(model, self._freed, key).atexit = False

    def _freed(self, key: Key) -> None:
        """Called on any thread."""
        entry = self._states.get(key)
        if entry is not None and entry.state is ModelState.UNLOADING:
            del self._states[key]
        log.info("model freed", extra={"model": key[0], "version": key[1]})


def index_of(repository: Repository) -> list[IndexEntry]:
    """Every version that is served or failed to load."""
    return [
        IndexEntry(model.name, model.version, ModelState.READY)
        if isinstance(model, LoadedModel)
        else IndexEntry(model.name, model.version, ModelState.UNAVAILABLE, model.reason)
        for model in repository
    ]


def initial_changes(models: Iterable[Model]) -> Iterator[ModelChange]:
    """The changes of a server that starts with some models."""
    for model in models:
        yield ModelChange(model.name, ChangeKind.LOAD, isinstance(model, LoadedModel))
