"""Requests that differ from an earlier one in vectors and id only: what was found of that one holds for them.

Callers send the same few shapes again and again. To parse, decode and validate a small request takes longer
than to compute it, and a large one is decoded on another thread. All of that depends on the bytes around the
vectors: if these are the same, so is the request.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import numpy as np
from google.protobuf.message import DecodeError

from attention_serving.server.engine.caller import ANYONE
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.repository import Repository
from attention_serving.server.engine.request_form import RequestForm
from attention_serving.server.engine.types import Request
from attention_serving.server.engine.validation import ValidatedRequest
from attention_serving.server.rpc import protobuf_bytes
from attention_serving.server.rpc.protobuf_bytes import Bounds, Path, Submessage
from attention_serving.server.rpc.transport.call import Call

# Sizes of messages, in bytes, of which requests are kept, and how many of each. With 3 to 6 kB for each
# request, that is 25 MB for a method at most.
CACHED_SIZES, MAX_ALIKE = 1024, 4
# Requests of more sequences are not kept.
MAX_SEQUENCES = 4
# How much a message may have around its vectors.
BOUNDS = Bounds(fields=64, rest_bytes=512)
# What the codec of a protocol needs to encode a reply.
R = TypeVar("R")


class ModelReference(NamedTuple):
    """A model as a request names it."""

    name: str
    version: str


class Incoming(NamedTuple, Generic[R]):
    """A request as its method handles it, recognised or decoded.

    Attributes:
        request: What the engine runs.
        reply: What encodes the reply.
        id: The caller's name for the request; empty if it has none.
    """

    request: ValidatedRequest
    reply: R
    id: str = ""


class Entry(Generic[R]):
    """A request without its vectors and its id.

    Attributes:
        fixed: The bytes that do not differ, each with its offset.
        id_place: Start and end of the id; None if there is none.
        model: The model. It can be freed: the entry is then dropped.
        form: Makes the request of the engine.
        arrays: For each of the model's inputs: where its vectors begin, their element type and shape.
        reply: What the codec needs to encode the reply.
    """

    __slots__ = ("arrays", "fixed", "form", "id_place", "model", "reply")

    def __init__(
        self,
        fixed: tuple[tuple[int, bytes], ...],
        id_place: tuple[int, int] | None,
        model: LoadedModel,
        form: RequestForm,
        arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...],
        reply: R,
    ) -> None:
        self.fixed, self.id_place, self.model, self.form = fixed, id_place, ref(model), form
        self.arrays, self.reply = arrays, reply

    def matches(self, message: bytes) -> bool:
        """Whether a message of the same size differs from this request in nothing else."""
        for at, part in self.fixed:  # noqa: SIM110 - a generator takes longer than the comparison
            if not message.startswith(part, at):
                return False
        return True


class RequestCache(Generic[R]):
    """The requests of one method that were used last. Any thread may use it."""

    def __init__(self, repository: Repository, fields: Submessage, id_path: Path) -> None:
        """Has no entry yet.

        Args:
            repository: The models. When they change, all entries are dropped.
            fields: The fields with vectors, and the id.
            id_path: The field of the id.
        """
        self._repository = repository
        self._changes = repository.changes
        self._fields = fields
        self._id_path = id_path
        # By size of the message. The size that was used last is the last; of each size, the entry that was
        # used last comes first.
        self._entries: OrderedDict[int, tuple[Entry[R], ...]] = OrderedDict()
        self._using = threading.Lock()

    def get(self, message: bytes, call: Call) -> Incoming[R] | None:
        """The request that a message is found to be by its bytes; None if it has to be decoded.

        Its arrays are views of the message. Whether the caller has the right for its model is not checked.
        """
        alike = self._entries.get(len(message), ())
        for entry in alike:
            if entry.matches(message):
                break
        else:
            return None
        model = entry.model()
        changes = self._repository.changes
        if changes != self._changes or model is None:
            self._clear(changes)
            return None
        if entry is not alike[0]:
            self._use(len(message), entry)
        else:
            self._touch(len(message))
        request_id = ""
        if entry.id_place is not None:
            start, end = entry.id_place
            try:
                request_id = message[start:end].decode()
            except UnicodeDecodeError:
                return None
        caller = ANYONE if call.identity is None else call.identity.caller
        rows = [np.ndarray(shape, dtype, message, start) for start, dtype, shape in entry.arrays]
        return Incoming(entry.form.filled(model, rows, call.deadline, caller), entry.reply, request_id)

    def store(
        self,
        message: bytes,
        named: ModelReference,
        decoded: Request,
        incoming: Incoming[R],
        inputs: Callable[[Sequence[Path]], Sequence[str]],
    ) -> None:
        """Keeps a request, unless more than its form decides whether it is valid.

        Args:
            message: The message as it was received.
            named: The model as it names it.
            decoded: What was decoded of it.
            incoming: What was made of that.
            inputs: The model's input that the vectors of each field are.
        """
        changes, model = self._repository.changes, incoming.request.model
        form = RequestForm.of(decoded, incoming.request)
        if form is None or len(form.shapes) > MAX_SEQUENCES or self._repository.find(*named) is not model:
            return
        vector_bytes = sum(decoded.inputs[spec.name].rows.nbytes for spec in model.inputs)
        if not 0 <= len(message) - vector_bytes <= BOUNDS.rest_bytes:
            return
        try:
            found = protobuf_bytes.places(message, self._fields, BOUNDS)
        except (LimitExceededError, DecodeError):
            return
        ids = [place for path, place in found if path == self._id_path]
        vectors = [(path, place) for path, place in found if path != self._id_path]
        names = inputs([path for path, _ in vectors])
        is_complete = sorted(names) == sorted(spec.name for spec in model.inputs)
        if len(ids) > 1 or len(names) != len(vectors) or not is_complete:
            return
        places = tuple([place for _, place in vectors])
        arrays = _arrays(decoded, [spec.name for spec in model.inputs], names, places)
        if arrays is None:
            return
        fixed = _fixed(message, [place for _, place in found])
        entry = Entry(fixed, ids[0] if ids else None, model, form, arrays, incoming.reply)
        if changes != self._changes:
            self._clear(changes)
        self._use(len(message), entry)

    def _clear(self, changes: int) -> None:
        """Drops all entries: a request may name another model now than it did."""
        with self._using:
            self._entries.clear()
            self._changes = changes

    def _touch(self, size: int) -> None:
        """The entry that was used last of a size is used again."""
        try:
            self._entries.move_to_end(size)
        except KeyError:  # another thread has just dropped it
            return

    def _use(self, size: int, entry: Entry[R]) -> None:
        """Keeps an entry as the most recently used one, in place of the least recently used one."""
        with self._using:
            others = [other for other in self._entries.get(size, ()) if other.fixed != entry.fixed]
            self._entries[size] = (entry, *others[: MAX_ALIKE - 1])
            self._entries.move_to_end(size)
            if len(self._entries) > CACHED_SIZES:
                self._entries.popitem(last=False)


def _arrays(
    request: Request, inputs: Sequence[str], names: Sequence[str], places: Sequence[tuple[int, int]]
) -> tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...] | None:
    """`Known.arrays`; None if a decoded input is not the same bytes as its vectors: converted, or cut."""
    arrays = []
    for name in inputs:
        rows = request.inputs[name].rows
        start, end = places[names.index(name)]
        if rows.nbytes != end - start:
            return None
        arrays.append((start, rows.dtype, rows.shape))
    return tuple(arrays)


def _fixed(message: bytes, places: Sequence[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
    """What is between the places, each with its offset."""
    starts = [0, *(end for _, end in places)]
    ends = [*(start for start, _ in places), len(message)]
    return tuple([(at, message[at:end]) for at, end in zip(starts, ends, strict=True) if at < end])
