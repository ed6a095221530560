"""Requests that differ from an earlier one in their vectors only: what was found of that one holds for them.

Callers send the same few shapes again and again. To decode and to validate a small request takes longer than
to compute it, and all of that follows from the message without its vectors: the head.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from server.engine.caller import Caller
from server.engine.dimensions import MAX_CACHED_SEQUENCES
from server.engine.model import LoadedModel
from server.engine.model_caches import cached_by_model
from server.engine.request_form import RequestForm
from server.engine.types import Request
from server.engine.validation import ValidatedRequest
from server.rpc.protobuf_bytes import Fields, Path

CACHED_REQUESTS = 1024
MAX_HEAD_BYTES = 1024
# What the codec of a protocol needs to encode a reply.
R = TypeVar("R")


class Head(NamedTuple):
    """A message whose vectors were taken out.

    Attributes:
        data: The rest of the message, serialized, without the id, which differs from request to request.
        contents: The vectors.
        paths: The field of each.
    """

    data: bytes
    contents: Sequence[bytes]
    paths: Sequence[Path]

    def fields(self) -> Fields:
        """The vectors as fields that were cut out of the message."""
        fields: dict[Path, list[memoryview]] = {}
        for path, content in zip(self.paths, self.contents, strict=True):
            fields.setdefault(path, []).append(memoryview(content))
        return fields


class Known(NamedTuple, Generic[R]):
    """What holds for every request with the same head.

    Attributes:
        form: Makes the request of the engine.
        arrays: For each of the model's inputs: which of the contents it is, its element type and its shape.
        reply: What the codec needs to encode the reply.
    """

    form: RequestForm
    arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    reply: R

    def request(self, contents: Sequence[bytes], deadline: float, caller: Caller) -> ValidatedRequest:
        """A request of the contents."""
        rows = [np.frombuffer(contents[at], dtype).reshape(shape) for at, dtype, shape in self.arrays]
        return self.form.filled(rows, deadline, caller)


class Slot(Generic[R]):
    """The place of one head.

    Attributes:
        known: None until a request with this head was found valid, or for ever if its content decides too.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Known[R] | None = None

    def learn(
        self,
        request: Request,
        validated: ValidatedRequest,
        contents: Sequence[bytes],
        names: Sequence[str],
        reply: R,
    ) -> None:
        """Keeps what follows from the head of a valid request.

        Args:
            request: The decoded request.
            validated: The same, validated.
            contents: The vectors of the message.
            names: The model's input that each of them is.
            reply: What the codec needs to encode the reply.
        """
        inputs = validated.model.inputs
        form = RequestForm.of(request, validated)
        is_small = len(validated.sequences) <= MAX_CACHED_SEQUENCES
        if form is None or not is_small or len(names) != len(contents):
            return
        if sorted(names) != sorted(spec.name for spec in inputs):
            return
        arrays = []
        for spec in inputs:
            at, rows = names.index(spec.name), request.inputs[spec.name].rows
            if rows.nbytes != len(contents[at]):  # converted, or cut by key lengths
                return
            arrays.append((at, rows.dtype, rows.shape))
        self.known = Known(form, tuple(arrays), reply)


class KnownRequests(Generic[R]):
    """The slots of the heads that were seen last. Any thread may use it."""

    def __init__(self) -> None:
        def new_slot(_model: LoadedModel, _head: bytes, *_sizes: int) -> Slot[R]:
            return Slot()

        self._slot = cached_by_model(CACHED_REQUESTS)(new_slot)

    def slot(self, model: LoadedModel, head: Head) -> Slot[R]:
        """The slot of a head, for the model that it names."""
        if len(head.data) > MAX_HEAD_BYTES:
            return Slot()
        return self._slot(model, head.data, *map(len, head.contents))
