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

from attention_serving.server.engine.caller import Caller
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.request_form import RequestForm
from attention_serving.server.engine.types import Request
from attention_serving.server.engine.validation import ValidatedRequest
from attention_serving.server.rpc import protobuf_bytes
from attention_serving.server.rpc.protobuf_bytes import Bounds, Path, Submessage

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


class Known(NamedTuple, Generic[R]):
    """A request without its vectors and its id.

    Attributes:
        fixed: The bytes that do not differ, each with its offset.
        id_place: Start and end of the id; None if there is none.
        named: The model as the request names it.
        model: The model. It can be freed: the requests are then known no more.
        form: Makes the request of the engine.
        arrays: For each of the model's inputs: where its vectors begin, their element type and shape.
        reply: What the codec needs to encode the reply.
    """

    fixed: tuple[tuple[int, bytes], ...]
    id_place: tuple[int, int] | None
    named: ModelReference
    model: "ref[LoadedModel]"
    form: RequestForm
    arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    reply: R

    def matches(self, message: bytes) -> bool:
        """Whether a message of the same size differs from this request in nothing else."""
        for at, part in self.fixed:  # noqa: SIM110 - a generator takes longer than the comparison
            if not message.startswith(part, at):
                return False
        return True


class Recalled(NamedTuple, Generic[R]):
    """A request that was recognised by its bytes.

    Attributes:
        known: What it has in common with the earlier one.
        model: The model that it names, which is served now.
        message: Its message.
        request_id: Its id.
    """

    known: Known[R]
    model: LoadedModel
    message: bytes
    request_id: str

    def request(self, deadline: float, caller: Caller) -> ValidatedRequest:
        """The request. Its arrays are views of the message."""
        rows = [np.ndarray(shape, dtype, self.message, start) for start, dtype, shape in self.known.arrays]
        return self.known.form.filled(self.model, rows, deadline, caller)


class Answered(NamedTuple, Generic[R]):
    """A request that was found valid.

    Attributes:
        named: The model as the message names it.
        request: The decoded request.
        validated: The same, validated.
        reply: What the codec needs to encode the reply.
    """

    named: ModelReference
    request: Request
    validated: ValidatedRequest
    reply: R


class KnownRequests(Generic[R]):
    """The requests of one method that were used last. Any thread may use it."""

    def __init__(self, engine: Engine, fields: Submessage, id_path: Path) -> None:
        """Knows nothing yet.

        Args:
            engine: Has the models.
            fields: The fields with vectors, and the id.
            id_path: The field of the id.
        """
        self._engine = engine
        self._fields = fields
        self._id_path = id_path
        # By size of the message. The size that was used last is the last; of each size, the request that was
        # used last comes first.
        self._known: OrderedDict[int, tuple[Known[R], ...]] = OrderedDict()
        self._using = threading.Lock()

    def recall(self, message: bytes) -> Recalled[R] | None:
        """The request that a message is known to be; None if it is not known, or its model was replaced."""
        alike = self._known.get(len(message), ())
        for known in alike:
            if known.matches(message):
                recalled = self._recalled(known, message)
                if recalled is not None and known is not alike[0]:
                    self._use(len(message), known)
                return recalled
        return None

    def _recalled(self, known: Known[R], message: bytes) -> Recalled[R] | None:
        request_id = ""
        try:
            if known.id_place is not None:
                request_id = str(memoryview(message)[slice(*known.id_place)], "utf-8")
            model = self._engine.model(*known.named)
            if model is not known.model():
                return None
            self._known.move_to_end(len(message))
        except (EngineError, UnicodeDecodeError, KeyError):  # KeyError: another thread has just dropped it
            return None
        return Recalled(known, model, message, request_id)

    def learn(
        self, message: bytes, answered: Answered[R], inputs: Callable[[Sequence[Path]], Sequence[str]]
    ) -> None:
        """Keeps a request, unless more than its form decides whether it is valid.

        Args:
            message: The message as it was received.
            answered: What was made of it.
            inputs: The model's input that the vectors of each field are.
        """
        form = RequestForm.of(answered.request, answered.validated)
        if form is None or len(form.shapes) > MAX_SEQUENCES:
            return
        model = answered.validated.model
        vector_bytes = sum(answered.request.inputs[spec.name].rows.nbytes for spec in model.inputs)
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
        arrays = _arrays(answered.request, [spec.name for spec in model.inputs], names, places)
        fixed = _fixed(message, [place for _, place in found])
        if arrays is None:
            return
        id_place = ids[0] if ids else None
        self._use(
            len(message), Known(fixed, id_place, answered.named, ref(model), form, arrays, answered.reply)
        )

    def _use(self, size: int, known: Known[R]) -> None:
        """Keeps a request as the most recently used one, in place of the least recently used one."""
        with self._using:
            others = [other for other in self._known.get(size, ()) if other.fixed != known.fixed]
            self._known[size] = (known, *others[: MAX_ALIKE - 1])
            self._known.move_to_end(size)
            if len(self._known) > CACHED_SIZES:
                self._known.popitem(last=False)


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
