"""Stored contexts: keys and values that are projected once, and that many requests attend to.

Those of a multi-vector encoder are documents: see `server.engine.requests.late_interaction`.

A context belongs to a loaded model, and is gone with it. Its id is a hash of the artifact and of the rows, so
that every server gives the same rows the same id. `LoadedModel.with_context` makes a model that
takes queries only. Requests of one context are therefore batched like those of any model, except
that their rows are concatenated into one sequence: nothing is padded.

If the memory is full, the least recently used contexts make room, among those of callers that hold more than
their equal share of it.
"""

import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from heapq import nlargest
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, finalize

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attention_serving.artifact.encoder import CONTEXT_VECTORS
from attention_serving.artifact.manifest import KEY_POSITIONS, PROJECTED
from attention_serving.server.engine.errors import (
    ContextNotFoundError,
    LimitExceededError,
    OverloadedError,
    UnsupportedError,
    quoted,
)
from attention_serving.server.engine.model import ContextModel, LoadedModel
from attention_serving.server.engine.types import (
    CONTEXT_BYTES,
    DOCUMENT_LENGTHS,
    DOCUMENT_VECTORS,
    Array,
    Context,
)

log = logging.getLogger(__name__)
# The caller who may use a context, empty if all may, and its id.
Key: TypeAlias = tuple[str, str]
CONTEXT_ID = "context_id"
DEFAULT_TTL_SECONDS = 3600
NOT_REMOVED_MESSAGE = "the file of the context cannot be removed from the folder of contexts; try again later"
DISABLED_MESSAGE = "stored contexts are switched off on this server; start it with max_context_bytes above 0"
# The files of contexts may take so many times the memory of contexts. They are looked at once a process has
# written this part of that.
FOLDER_FACTOR, LOOK_SHARE = 4, 1 / 16
PURGE_SECONDS = 1.0
# What the file of a context states in addition to its tensors.
FACTS = ("nbytes", "length", "owner", "shared")


class ContextStore:
    """The contexts of all models. May be used by any thread.

    Attributes:
        limit_bytes: Memory that contexts may take; 0 if there are none.
        held_bytes: Memory that they take, those in use by runs included.
        hits: How many requests found their context.
        misses: How many did not.
        evictions: How many contexts made room for others.
        folder_errors: How often the folder could not be read or written.
        reads_files: Whether to look for a context can take long.
    """

    def __init__(self, limit_bytes: int, folder: Path | None = None) -> None:
        """Begins without contexts in memory.

        Args:
            limit_bytes: Memory that contexts may take; 0 switches them off.
            folder: Where contexts are kept across restarts and evictions; None for nowhere.
        """
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.hits = self.misses = self.evictions = self.folder_errors = 0
        self._folder, self._folder_error = folder, ""
        self.reads_files = folder is not None
        # Bytes that may be written before the files are looked at.
        self._folder_room = 0.0
        self._lock = threading.RLock()
        self._uses = count(1)
        self._stored: WeakKeyDictionary[LoadedModel, dict[Key, ContextModel]] = WeakKeyDictionary()
        # Unix time of the next search for contexts that have expired.
        self._purge_at = 0.0
        if folder is not None:
            with self._folder_errors():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, model: LoadedModel, context_id: str, caller: str, field: str = CONTEXT_ID) -> ContextModel:
        """The model that takes queries to a context.

        Args:
            model: The model of the repository.
            context_id: The context.
            caller: Who asks.
            field: Name of the request's field that has the id, for the error.

        Raises:
            ContextNotFoundError: The context does not exist, or is another caller's.
        """
        view = self.get(model, context_id, caller)
        with self._lock:
            self.hits += view is not None
            self.misses += view is None
        if view is None:
            raise _not_found(model, context_id, field)
        return view

    def get(self, model: LoadedModel, context_id: str, caller: str) -> ContextModel | None:
        """As `find`; None if there is no such context."""
        with self._lock:
            contexts = self._stored.get(model, {})
            for key in ((caller, context_id), ("", context_id)):
                if (view := contexts.get(key)) is not None and self._may_use(view.context, caller):
                    return view
        return self._restore(model, context_id, caller)

    def use(self, context: Context, caller: str) -> bool:
        """Whether a request may still use the context that it found before."""
        is_there = self._may_use(context, caller)
        with self._lock:
            self.hits += is_there  # otherwise it is looked for again
        return is_there

    def _may_use(self, context: Context, caller: str) -> bool:
        if not context.is_stored or context.expires_at < time.time():
            return False
        if caller != context.owner and not context.shared:
            return False
        context.used = next(self._uses)
        return True

    def put(
        self, model: LoadedModel, context: Context, tensors: Callable[[], Mapping[str, Array]]
    ) -> ContextModel:
        """Stores a context.

        Args:
            model: The model of the repository.
            context: The context; its tensors are set.
            tensors: Makes its tensors, once there is room for them.

        Returns:
            The model that takes queries to it.

        Raises:
            LimitExceededError: It is larger than all contexts may be.
            OverloadedError: The memory is taken by the contexts of others, or by those in use.
        """
        view = self._put(model, context, tensors)
        if self._folder is not None:
            self._save(self._folder, model, context)
        return view

    def _put(
        self, model: LoadedModel, context: Context, tensors: Callable[[], Mapping[str, Array]]
    ) -> ContextModel:
        self.check_size(context.nbytes)
        with self._lock:
            self._make_room(context)
            self.held_bytes += context.nbytes
            finalize(context, self._freed, context.nbytes)
        context.tensors = tensors()
        view = model.with_context(context)
        with self._lock:
            context.used = next(self._uses)
            self._drop(model, _key(context))
            self._stored.setdefault(model, {})[_key(context)] = view
        return view

    def renew(self, model: LoadedModel, context: Context, expires_at: float) -> None:
        """Lets a context live longer, which its owner has put again."""
        context.expires_at = max(context.expires_at, expires_at)
        if self._folder is not None:
            with self._folder_errors(), suppress(FileNotFoundError):
                path = self._folder / _file_name(model, context.id, _key(context)[0])
                os.utime(path, (context.expires_at, context.expires_at))

    def check_size(self, size: int, field: str = "key") -> None:
        """Checks whether a context of that many bytes, of a field of the request, could be stored.

        Raises:
            LimitExceededError: It is larger than all contexts may be.
            UnsupportedError: There are no contexts.
        """
        if not self.limit_bytes:
            raise UnsupportedError(DISABLED_MESSAGE)
        if size > self.limit_bytes:
            message = f"the context would take {size} bytes; all contexts may take {self.limit_bytes}"
            raise LimitExceededError(field, message)

    def drop(self, model: LoadedModel, context_id: str, caller: str) -> None:
        """Removes a context of a caller, from the folder too. Other processes keep what they have in memory.

        Raises:
            ContextNotFoundError: It does not exist, or is another caller's.
            OverloadedError: Its file cannot be removed.
        """
        for user in dict.fromkeys((caller, "")):
            with self._lock:
                stored = self._stored.get(model, {}).get((user, context_id))
            owner = None if stored is None else stored.context.owner
            if self._folder is not None:
                path = self._folder / _file_name(model, context_id, user)
                if owner is None:
                    with self._folder_errors(), suppress(FileNotFoundError), safe_open(path, "np") as file:
                        owner = (file.metadata() or {}).get("owner")
                if owner == caller:
                    with self._folder_errors(OverloadedError(NOT_REMOVED_MESSAGE, retry_after=1.0)):
                        path.unlink(missing_ok=True)
            if owner == caller:
                with self._lock:
                    self._drop(model, (user, context_id))
                return
        raise _not_found(model, context_id, "id")

    def page(
        self, model: LoadedModel, caller: str, size: int, before: float = math.inf
    ) -> tuple[list[Context], int]:
        """Some of the contexts of a model that a caller may use, the most recently used ones first.

        Args:
            model: The model of the repository.
            caller: Who asks.
            size: Number of contexts, at least 1.
            before: What the page before returned; infinite for the first.

        Returns:
            The contexts, and where the next page begins; 0 if there is none.
        """
        with self._lock:
            contexts = [view.context for view in self._stored.get(model, {}).values()]
        now = time.time()
        usable = (
            (context.used, context)
            for context in contexts
            if (context.shared or context.owner == caller) and context.expires_at >= now
        )
        page = nlargest(size + 1, (entry for entry in usable if entry[0] < before))
        return [context for _, context in page[:size]], page[size - 1][0] if len(page) > size else 0

    def purge(self) -> None:
        """Removes what has expired, not more often than every second."""
        now = time.time()
        with self._lock:
            if now < self._purge_at:
                return
            self._purge_at = now + PURGE_SECONDS
            for model, key, context in self._all():
                if context.expires_at < now:
                    self._drop(model, key)

    def _all(self) -> list[tuple[LoadedModel, Key, Context]]:
        return [
            (model, key, view.context) for model, views in self._stored.items() for key, view in views.items()
        ]

    def _drop(self, model: LoadedModel, key: Key) -> None:
        view = self._stored.get(model, {}).pop(key, None)
        if view is not None:
            view.context.is_stored = False

    def _make_room(self, new: Context) -> None:
        """Evicts contexts until a new one fits."""
        self.purge()
        excess = self.held_bytes + new.nbytes - self.limit_bytes
        if excess <= 0:
            return
        # Without the contexts themselves, whose memory is free once nothing refers to them.
        entries = [(entry.used, entry.owner, entry.nbytes, model, key) for model, key, entry in self._all()]
        held_bytes = Counter({new.owner: new.nbytes})
        for _, owner, size, _, _ in entries:
            held_bytes[owner] += size
        share, victims = self.limit_bytes / len(held_bytes), []
        for _, owner, size, model, key in sorted(entries, key=lambda entry: entry[0]):
            if excess > 0 and held_bytes[owner] > share:
                victims.append((model, key))
                held_bytes[owner] -= size
                excess -= size
        if excess <= 0:
            for model, key in victims:
                self._drop(model, key)
                self.evictions += 1
        if self.held_bytes + new.nbytes > self.limit_bytes:
            message = "the memory of contexts is in use, or other callers hold their share of it"
            raise OverloadedError(f"{message}; drop contexts or try again later", retry_after=1.0)

    def _freed(self, size: int) -> None:
        with self._lock:
            self.held_bytes -= size

    @contextmanager
    def _folder_errors(self, overloaded: OverloadedError | None = None) -> Iterator[None]:
        """Errors of the folder are counted and logged: contexts are served from memory all the same.

        Args:
            overloaded: What is raised after one; None for nothing.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.folder_errors += 1
            reason = getattr(error, "strerror", None) or str(error)
            if reason != self._folder_error:
                log.warning("context folder failed", extra={"folder": self._folder, "reason": reason})
            self._folder_error = reason
            if overloaded is not None:
                raise overloaded from error

    def _save(self, folder: Path, model: LoadedModel, context: Context) -> None:
        """Writes a context to its file, which is as old as the context is to become. Best effort."""
        path = folder / _file_name(model, context.id, _key(context)[0])
        temporary = folder / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        facts = {name: str(getattr(context, name)) for name in FACTS}
        facts["digest"] = _digest(facts, context.tensors)
        with self._folder_errors():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                save_file(dict(context.tensors), temporary, facts)
                os.utime(temporary, (context.expires_at, context.expires_at))
                self._folder_room -= temporary.stat().st_size + CONTEXT_BYTES
                temporary.replace(path)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            if self._folder_room <= 0:
                self._bound(folder)
            self._folder_error = ""

    def _bound(self, folder: Path) -> None:
        """Removes files that have expired, and those that expire first while all are too large.

        Hidden files are temporary. What a process that was killed left of them expires too.
        """
        limit, files, now = FOLDER_FACTOR * self.limit_bytes, list[tuple[float, int, str]](), time.time()
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process removed it
                    status = entry.stat()
                    lifetime = DEFAULT_TTL_SECONDS if entry.name[0] == "." else 0
                    files.append((status.st_mtime + lifetime, status.st_size + CONTEXT_BYTES, entry.path))
        total, self._folder_room = sum(size for _, size, _ in files), LOOK_SHARE * limit
        for expires, size, path in sorted(files):
            if expires < now or total > limit - self._folder_room:
                Path(path).unlink(missing_ok=True)
                total -= size

    def _restore(self, model: LoadedModel, context_id: str, caller: str) -> ContextModel | None:
        """A context from its file; None if there is none."""
        if self._folder is None:
            return None
        for owner in dict.fromkeys((caller, "")):
            path = self._folder / _file_name(model, context_id, owner)
            with self._folder_errors(), suppress(FileNotFoundError):
                try:
                    with safe_open(path, "np") as file:
                        context = _describe(file, context_id, path.stat().st_mtime)
                        if context.expires_at > time.time():
                            return self._put(model, context, partial(_read, file))
                # It is damaged, or the limit is lower than it was.
                except (SafetensorError, KeyError, ValueError, LimitExceededError):
                    pass
                path.unlink()
        return None


def context_id(model: LoadedModel, parent: str, arrays: Mapping[str, Array]) -> str:
    """The id of a context: SHA-256 of the artifact, the context that it continues if any, and its rows.

    Args:
        model: The model of the repository.
        parent: Id of the context that the rows are appended to; empty for a new one.
        arrays: The inputs of `LoadedModel.projector` and the positions of the rows, or the token ids of
            documents with their lengths and kind.
    """
    return _hash(f"{model.digest}{parent}", arrays)


def _hash(head: str, arrays: Mapping[str, Array]) -> str:
    """SHA-256 of a text and of arrays in their order, in hex."""
    digest = hashlib.sha256(head.encode())
    for name, array in arrays.items():
        digest.update(f" {name} {array.dtype.name} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def projected_inputs(projector: LoadedModel, rows: Mapping[str, Array], positions: Array) -> dict[str, Array]:
    """The inputs of `LoadedModel.projector`: rows by name, and their positions if it takes them."""
    takes_positions = KEY_POSITIONS in projector.inputs_by_name
    return {**rows, KEY_POSITIONS: positions} if takes_positions else dict(rows)


def join_tensors(
    positions: Array, parent: Context | None, projected: Mapping[str, Sequence[Array]]
) -> dict[str, Array]:
    """The tensors of a context: those of the context that it continues, and further ones.

    Args:
        positions: (T,).
        parent: The context that is continued; None for a new one.
        projected: (Hkv, T, d) by name, as `GraphKind.PROJECT` returns them for one sequence.
    """
    new: dict[str, Array] = {name: projected[name][0][np.newaxis] for name in PROJECTED}
    new[KEY_POSITIONS] = positions[np.newaxis]
    if parent is None:
        return {name: array.copy() for name, array in new.items()}
    axes = dict.fromkeys(PROJECTED, 2) | {KEY_POSITIONS: 1}
    return {name: np.concatenate([parent.tensors[name], new[name]], axis) for name, axis in axes.items()}


def join_documents(parent: Context | None, outputs: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
    """As `join_tensors`, of documents: their token vectors (T, d) are `CONTEXT_VECTORS`."""
    vectors = outputs[CONTEXT_VECTORS]
    parts = {DOCUMENT_VECTORS: list(vectors), DOCUMENT_LENGTHS: [np.array([*map(len, vectors)], np.int64)]}
    earlier = {} if parent is None else parent.tensors
    return {
        name: np.concatenate([*([earlier[name]] if earlier else []), *arrays])
        for name, arrays in parts.items()
    }


def _key(context: Context) -> Key:
    return "" if context.shared else context.owner, context.id


def _file_name(model: LoadedModel, context_id: str, owner: str) -> str:
    """The name of the file of a context. An id that a caller sends may be that of another model."""
    return hashlib.sha256(f"{model.digest}{owner}\0{context_id}".encode()).hexdigest()


def _not_found(model: LoadedModel, context_id: str, field: str) -> ContextNotFoundError:
    message = (
        f"context {quoted(context_id)} of model {quoted(model.name)} does not exist here; put it (again)"
    )
    return ContextNotFoundError(message, field=field)


def _digest(facts: Mapping[str, str], tensors: Mapping[str, Array]) -> str:
    """SHA-256 of what a file holds."""
    return _hash(repr([facts[name] for name in FACTS]), dict(sorted(tensors.items())))


def _describe(file: Any, context_id: str, expires_at: float) -> Context:
    """The context in a file of safetensors, without its tensors."""
    facts = file.metadata() or {}
    return Context(
        id=context_id,
        nbytes=int(facts["nbytes"]),
        length=int(facts["length"]),
        owner=facts["owner"],
        shared=facts["shared"] == str(True),
        expires_at=expires_at,
    )


def _read(file: Any) -> dict[str, Array]:
    """The tensors in a file.

    Raises:
        ValueError: The file is damaged.
    """
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    if _digest(file.metadata(), tensors) != file.metadata()["digest"]:
        raise ValueError("the file does not have its digest")
    return tensors
