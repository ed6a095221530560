"""Requests that differ from an earlier one in vectors and id only: what was found of that one holds for them.

Callers send the same few shapes again and again. To parse, decode and validate a small request takes longer
than to compute it, and a large one is decoded on another thread. All of that depends on the bytes around the
vectors: if these are the same, so is the request.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar
from weakref import ref

import numpy as np
from google.protobuf.message import DecodeError

from attention_serving.artifact.manifest import POSITIONS
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.api.codec_threads import LARGE_REPLY_BYTES
from attention_serving.server.api.protobuf_bytes import Bounds, Path, Submessage
from attention_serving.server.api.tensors import to_bytes
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import LimitExceededError, ModelNotFoundError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validated_request import RequestForm, ValidatedRequest
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.transport.call import Call

# Sizes of messages, in bytes, of which requests are kept, and how many of each. With 3 to 6 kB for each
# request, that is 30 MB for a method at most.
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


class KnownFields(NamedTuple):
    """Where messages differ that are otherwise the same.

    Attributes:
        fields: The fields with vectors, and the id.
        id_path: The field of the id; empty if there is none.
    """

    fields: Submessage
    id_path: Path


class ReplyFrame(NamedTuple):
    """The bytes of a reply around its outputs and its id. Those of other replies of its form are the same.

    Attributes:
        pieces: Bytes, and what follows them: an output by its name, or the id for None.
        end: The bytes after the last of them.
    """

    pieces: tuple[tuple[bytes, str | None], ...]
    end: bytes

    @classmethod
    def of(cls, reply: bytes, result: Result, fields: Submessage, id_path: Path) -> Self | None:
        """The frame of a reply; None if its contents are not exactly outputs, each of which can be told.

        Args:
            reply: The serialized reply.
            result: What it was encoded from.
            fields: Its fields with vectors, and the id.
            id_path: The field of the id.
        """
        outputs = {name: b"".join(to_bytes(arrays)) for name, arrays in result.outputs.items()}
        pieces, at = [], 0
        for path, (start, end) in protobuf_bytes.places(reply, fields, BOUNDS):
            content, name = reply[start:end], None
            if path != id_path:
                same = [name for name, output in outputs.items() if output == content]
                if len(same) != 1:
                    return None
                name = same[0]
            pieces.append((reply[at:start], name))
            at = end
        return cls(tuple(pieces), reply[at:])

    def reply(self, result: Result, request_id: str) -> bytes:
        """The reply with another result and another id of the same size."""
        parts: list[Any] = []
        for before, name in self.pieces:
            parts.append(before)
            if name is None:
                parts.append(request_id.encode())
            else:  # those of a run with padding are views with gaps
                arrays = result.outputs[name]
                parts += [own if own.flags.c_contiguous else np.ascontiguousarray(own) for own in arrays]
        parts.append(self.end)
        return b"".join(parts)


class Incoming(NamedTuple, Generic[R]):
    """A request as its method handles it, recognised or decoded.

    Attributes:
        request: What the engine runs.
        encoder: What encodes the reply, beside the result and the model.
        id: The caller's name for the request; empty if it has none.
        entry: What it was recognised by; None if it was decoded.
    """

    request: ValidatedRequest
    encoder: R
    id: str = ""
    entry: "Entry[R] | None" = None


class Entry(Generic[R]):
    """A request without its vectors and its id.

    Attributes:
        fixed: The bytes that do not differ, each with its offset.
        id_place: Start and end of the id; None if there is none.
        named: The model as the request names it.
        model: The model. It can be freed: the entry is then dropped.
        form: Makes the request of the engine.
        arrays: For each of the model's inputs: where its vectors begin, their element type and shape.
        encoder: What encodes the reply, beside the result and the model.
        frame: The bytes around its outputs; None before the first reply, and if that has none.
        is_framed: Whether a frame was looked for.
    """

    __slots__ = ("arrays", "encoder", "fixed", "form", "frame", "id_place", "is_framed", "model", "named")

    def __init__(
        self,
        fixed: tuple[tuple[int, bytes], ...],
        id_place: tuple[int, int] | None,
        named: ModelReference,
        model: LoadedModel,
        form: RequestForm,
        arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...],
        encoder: R,
    ) -> None:
        self.fixed, self.id_place, self.form = fixed, id_place, form
        self.named, self.model = named, ref(model)
        self.arrays, self.encoder = arrays, encoder
        self.frame: ReplyFrame | None = None
        self.is_framed = False

    def matches(self, message: bytes) -> bool:
        """Whether a message of the same size differs from this request in nothing else."""
        for at, part in self.fixed:  # noqa: SIM110 - a generator takes longer than the comparison
            if not message.startswith(part, at):
                return False
        return True


class RequestCache(Generic[R]):
    """The requests of one method that were used last. Any thread may use it."""

    def __init__(self, repository: Repository, requests: KnownFields, replies: KnownFields) -> None:
        """Has no entry yet.

        Args:
            repository: The models. When they change, the entries of those that changed are dropped.
            requests: Where requests of one entry differ.
            replies: Where their replies differ.
        """
        self._repository = repository
        self._changes = repository.changes
        self._fields, self._id_path = requests
        self._replies = replies
        # By size of the message. The size that was used last is the last; of each size, the entry that was
        # used last comes first.
        self._entries: OrderedDict[int, tuple[Entry[R], ...]] = OrderedDict()
        self._using = threading.Lock()

    def get(self, message: bytes, call: Call) -> Incoming[R] | None:
        """The request that a message is found to be by its bytes; None if it has to be decoded.

        Its arrays are views of the message. Whether the caller has the right for its model is not checked.
        """
        size = len(message)
        alike = self._entries.get(size, ())
        for entry in alike:
            if entry.matches(message):
                break
        else:
            return None
        if self._changes != self._repository.changes:
            self._drop_replaced()
            alike = self._entries.get(size, ())
            if entry not in alike:
                return None
        model = entry.model()
        if model is None:
            return None
        if entry is not alike[0]:
            self._use(size, entry)
        else:
            try:
                self._entries.move_to_end(size)
            except KeyError:  # another thread has just dropped it
                return None
        request_id = ""
        if entry.id_place is not None:
            start, end = entry.id_place
            try:
                request_id = message[start:end].decode()
            except UnicodeDecodeError:
                return None
        caller = ANYONE if call.identity is None else call.identity.caller
        rows = [np.ndarray(shape, dtype, message, start) for start, dtype, shape in entry.arrays]
        request = entry.form.filled(model, rows, call.deadline, caller)
        return Incoming(request, entry.encoder, request_id, entry)

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
        form = incoming.request.form
        if len(form.shapes) > MAX_SEQUENCES or not _depends_on_form(decoded, model):
            return
        if self._repository.find(*named) is not model:
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
        entry = Entry(fixed, ids[0] if ids else None, named, model, form, arrays, incoming.encoder)
        self._use(len(message), entry)
        if changes != self._repository.changes:  # since its model was looked up
            self._drop_replaced()

    def known_reply(self, incoming: Incoming[R], result: Result, reservation: Reservation) -> bytes | None:
        """The reply to a request whose entry has a frame; None if the reply must be encoded."""
        entry = incoming.entry
        is_plain = reservation.timeline is None and reservation.size <= LARGE_REPLY_BYTES
        if entry is None or entry.frame is None or not is_plain:
            return None
        return entry.frame.reply(result, incoming.id)

    def keep_reply(self, incoming: Incoming[R], result: Result, reply: bytes) -> None:
        """Keeps the frame of the first reply that was encoded, if its request has an entry."""
        entry = incoming.entry
        if entry is not None and not entry.is_framed and len(reply) <= LARGE_REPLY_BYTES:
            entry.is_framed = True
            entry.frame = ReplyFrame.of(reply, result, *self._replies)

    def _drop_replaced(self) -> None:
        """Drops the entries whose requests name another model now than they did, or none."""
        with self._using:
            changes, kept = self._repository.changes, OrderedDict[int, tuple[Entry[R], ...]]()
            for size, alike in list(self._entries.items()):
                if served := tuple([entry for entry in alike if self._is_served(entry)]):
                    kept[size] = served
            self._entries, self._changes = kept, changes

    def _is_served(self, entry: Entry[R]) -> bool:
        try:
            return self._repository.find(*entry.named) is entry.model()
        except ModelNotFoundError:
            return False

    def _use(self, size: int, entry: Entry[R]) -> None:
        """Keeps an entry as the most recently used one, in place of the least recently used one."""
        with self._using:
            others = [other for other in self._entries.get(size, ()) if other.fixed != entry.fixed]
            self._entries[size] = (entry, *others[: MAX_ALIKE - 1])
            self._entries.move_to_end(size)
            if len(self._entries) > CACHED_SIZES:
                self._entries.popitem(last=False)


def _depends_on_form(request: Request, model: LoadedModel) -> bool:
    """Whether nothing but the lengths of its sequences decides whether a request is valid."""
    if request.texts or request.mask or request.spans or request.offsets or request.head_selection:
        return False
    return not any(
        spec.name == POSITIONS or spec.exclusive_upper_bound is not None or spec.data_type == "bool"
        for spec in model.inputs
    )


def _arrays(
    request: Request, inputs: Sequence[str], names: Sequence[str], places: Sequence[tuple[int, int]]
) -> tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...] | None:
    """`Entry.arrays`; None if a decoded input is not the same bytes as its vectors: converted, or cut."""
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
