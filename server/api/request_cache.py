"""Requests that differ from an earlier one in vectors and id only: what was found of that one holds for them.

Callers send the same few shapes again and again. To parse, decode and validate a small request takes longer
than to compute it, and a large one is decoded on another thread. All of that depends on the bytes around the
vectors: if these are the same, so is the request.
"""

from collections import OrderedDict
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from attention_serving.artifact.manifest import POSITIONS
from attention_serving.server.api.protobuf_bytes import Parsed
from attention_serving.server.api.tensors import Reply
from attention_serving.server.engine.errors import ModelNotFoundError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validated_request import RequestForm, ValidatedRequest
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.engine.types import Array, Request
from attention_serving.server.transport.call import Call

# Sizes of messages, in bytes, of which requests are kept, and how many of each. With 3 to 6 kB for each
# request, that is 30 MB for a method at most.
CACHED_SIZES, MAX_ALIKE = 1024, 4
# Requests of more sequences are not kept, nor those with more bytes around their vectors.
MAX_SEQUENCES, MAX_REST_BYTES = 4, 512
# What a method does with a request: runs it, and encodes the reply; and the caller's name for it.
Known: TypeAlias = tuple[ValidatedRequest, Reply, str]


class Entry:
    """What requests with the same bytes around their vectors and ids have in common.

    Attributes:
        fixed: These bytes, in pieces.
        offsets: Where each of them begins.
        id_place: Where the id is; None if there is none.
        named: The name and version by which they name the model.
        model: The model. It can be freed: the entry is then dropped.
        form: Makes the request of the engine.
        arrays: For each of the model's inputs: name, shape, element type, and where its vectors begin.
        reply: Encodes their replies.
    """

    __slots__ = ("arrays", "fixed", "form", "id_place", "model", "named", "offsets", "reply")

    def __init__(
        self,
        parsed: Parsed[Any],
        model: LoadedModel,
        form: RequestForm,
        arrays: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...],
        reply: Reply,
    ) -> None:
        message, data = parsed.message, parsed.data
        ids = parsed.places.get(("id",), ())
        vectors = [(start, start + dtype.itemsize * int(np.prod(shape))) for _, shape, dtype, start in arrays]
        differing = sorted([*vectors, *ids])
        starts, ends = [0, *(end for _, end in differing)], [*(start for start, _ in differing), len(data)]
        self.fixed = tuple([data[at:end] for at, end in zip(starts, ends, strict=True)])
        self.offsets = tuple(starts)
        self.id_place = slice(*ids[0]) if ids else None
        self.named = (message.model_name, message.model_version)
        self.model = ref(model)
        self.form, self.arrays, self.reply = form, arrays, reply


class RequestCache:
    """The requests of one method that were used last. Belongs to the thread of calls."""

    def __init__(self, repository: Repository) -> None:
        """Has no entry yet; when models of the repository change, the entries of those are dropped."""
        self._repository = repository
        self._changes = repository.changes
        # By size of the message. The size that was used last is the last; of each size, the entry that was
        # used last comes first.
        self._entries: OrderedDict[int, tuple[Entry, ...]] = OrderedDict()

    def get(self, message: bytes, call: Call) -> Known | None:
        """The request that a message is found to be by its bytes; None if it has to be decoded.

        Its arrays are views of the message. Whether the caller has the right for its model is not checked.
        """
        if self._changes != self._repository.changes:
            self._drop_replaced()
        size = len(message)
        alike = self._entries.get(size, ())
        for entry in alike:
            if all(map(message.startswith, entry.fixed, entry.offsets)):
                break
        else:
            return None
        model = entry.model()
        if model is None:
            return None
        request_id = ""
        if entry.id_place is not None:
            try:
                request_id = message[entry.id_place].decode()
            except UnicodeDecodeError:
                return None
        if entry is alike[0]:
            self._entries.move_to_end(size)
        else:
            self._use(size, entry)
        caller = ANYONE if call.identity is None else call.identity.caller
        rows = {}
        for name, shape, dtype, start in entry.arrays:
            rows[name] = np.ndarray(shape, dtype, message, start)
        return entry.form.filled(model, rows, call.deadline, caller), entry.reply, request_id

    def keep(self, parsed: Parsed[Any], decoded: Request, request: ValidatedRequest, reply: Reply) -> None:
        """Keeps a request, unless more than the bytes around its vectors decides what it is.

        Args:
            parsed: The request as it was received.
            decoded: What was decoded of it.
            request: What was made of that.
            reply: Encodes the reply.
        """
        model = request.model
        if (
            not reply.is_kept
            or len(request.form.shapes) > MAX_SEQUENCES
            or not _depends_on_form(decoded, model)
        ):
            return
        rows = {spec.name: decoded.inputs[spec.name].rows for spec in model.inputs}
        rest_bytes = len(parsed.data) - sum([own.nbytes for own in rows.values()])
        if not 0 <= rest_bytes <= MAX_REST_BYTES or len(parsed.places.get(("id",), ())) > 1:
            return
        # Inputs that are not the very bytes of the message were converted, cut, or sent elsewhere.
        start = _address(np.frombuffer(parsed.data, np.uint8))
        arrays = tuple([(name, own.shape, own.dtype, _address(own) - start) for name, own in rows.items()])
        for name, _, _, at in arrays:
            own = rows[name]
            if not (own.flags.c_contiguous and 0 <= at <= len(parsed.data) - own.nbytes):
                return
        entry = Entry(parsed, model, request.form, arrays, reply)
        if self._is_served(entry):
            self._use(len(parsed.data), entry)

    def _use(self, size: int, entry: Entry) -> None:
        """Keeps an entry as the most recently used one, in place of the least recently used one."""
        own = (entry.fixed, entry.offsets)
        others = [other for other in self._entries.get(size, ()) if (other.fixed, other.offsets) != own]
        self._entries[size] = (entry, *others[: MAX_ALIKE - 1])
        self._entries.move_to_end(size)
        if len(self._entries) > CACHED_SIZES:
            self._entries.popitem(last=False)

    def _drop_replaced(self) -> None:
        """Drops the entries whose requests name another model now than they did, or none."""
        self._changes = self._repository.changes
        for size, alike in list(self._entries.items()):
            self._entries[size] = tuple([entry for entry in alike if self._is_served(entry)])

    def _is_served(self, entry: Entry) -> bool:
        try:
            return self._repository.find(*entry.named) is entry.model()
        except ModelNotFoundError:
            return False


def _depends_on_form(request: Request, model: LoadedModel) -> bool:
    """Whether nothing but the lengths of its sequences decides whether a request is valid."""
    if request.texts or request.mask or request.spans or request.offsets or request.head_selection:
        return False
    return not any(
        spec.name == POSITIONS or spec.exclusive_upper_bound is not None or spec.data_type == "bool"
        for spec in model.inputs
    )


def _address(array: Array) -> int:
    """Where the elements of an array begin in memory."""
    address: int = array.__array_interface__["data"][0]
    return address
