"""How a request of inference is answered, by every method of both protocols: decode, run, encode.

Callers send the same few shapes again and again. To parse, decode and validate a small request takes longer
than to compute it, and a large one is decoded on another thread. All of that depends on the bytes outside the
tensors: a request whose bytes there are those of an earlier one is a cache hit (`RequestCache`).
"""

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import numpy as np

from attention_serving.artifact.manifest import POSITIONS
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import log_and_wrap_error
from attention_serving.server.api.method import LARGE_BYTES, Method, find_model, has_right, parse
from attention_serving.server.api.tensors import Allowance, ReplyTemplate
from attention_serving.server.api.wire import Parsed, field_header, make_parser
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.contexts import CONTEXT_ID
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Plan, Request
from attention_serving.server.engine.types import Array, DecodedRequest, Result
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# Replies to requests that hold more memory, with message, result and reply, are encoded on the codec threads.
# To encode a third of that takes less than a millisecond.
LARGE_RESERVATION_BYTES = 3 << 20
# Sizes of messages, in bytes, of which requests are cached, and how many of each. With 3 to 6 kB for each
# request, that is 30 MB for a method at most.
CACHED_SIZES, MAX_ALIKE = 1024, 4
# Requests of more sequences are not cached, nor those with more bytes outside their tensors.
MAX_SEQUENCES, MAX_FIXED_BYTES = 4, 512


class InferenceMethod(ABC):
    """Base class of the inference RPCs; subclasses implement one protocol each.

    Attributes:
        message_type: The type of its messages.
        request_field: The field of a message that is the request; empty if the message is.
        paths: What is extracted from a request.
        id_path: Number of the reply's field that has the id of the request, in a tuple.
        is_slow: Whether a request takes long to decode even if it is not large.
        is_stream: Whether its requests are those of a stream, where the reply to one that fails is an error,
            and the stream goes on.
    """

    message_type: ClassVar[Any]
    request_field: ClassVar[str] = ""
    paths: ClassVar[Sequence[str]]
    id_path: ClassVar[tuple[int]]
    is_slow: Callable[[Parsed[Any]], bool]
    is_stream: ClassVar[bool] = False

    def __init__(self, engine: Engine, threads: CodecThreads) -> None:
        """Creates the method.

        Args:
            engine: Computes results.
            threads: Decode and encode what is large.
        """
        self._engine, self._threads = engine, threads
        self._parse_message = make_parser(
            self.message_type, self.paths, engine.limits.max_sequences, self.request_field
        )
        self._cache = RequestCache(engine)

    def method(self) -> Method:
        """What the server knows of the method."""
        return Method(
            kind="ordered stream" if self.is_stream else "unary",
            handle=self.handle,
            is_inference=True,
            right=Right.INFER,
            budget=self._engine.budget,
        )

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        request_id = None
        try:
            if cached := self._cache.get(message, call):
                request, reply, request_id = cached
                result = await self._engine.submit_and_wait(request, reservation, len(message))
            else:
                reservation.add(len(message))
                work, is_large = partial(parse, self._parse_message, message), len(message) > LARGE_BYTES
                parsed = await self._threads.run(work, call.deadline) if is_large else work()
                request_id = parsed.id
                request, reply = await self._decode_and_cache(parsed, call, reservation)
                result = await self._engine.submit_and_wait(request, reservation)
            for step in reply.steps(result) if reply.steps is not None else ():
                await self._threads.run(step, call.deadline)
            is_large = reservation.size > LARGE_RESERVATION_BYTES
            if reservation.timeline is None and not is_large:
                return self._encode(reply, result, request_id)
            encode = partial(self._encode_timed, reply, result, request_id, reservation)
            return await self._threads.run(encode, call.deadline) if is_large else encode()
        except Exception as error:
            if not self.is_stream:
                raise
            # Not a variable: the error refers to this frame, and neither may keep the other alive.
            name = self._leading_id(message) if request_id is None else request_id
            raise self._with_reply(log_and_wrap_error(error), name) from None

    def _model_name(self, parsed: Parsed[Any], call: Call) -> str:  # noqa: ARG002 - for subclasses
        """The name of the model that a request is for."""
        name: str = parsed.message.model_name
        return name

    def _context_id(self, parsed: Parsed[Any]) -> str:
        """The id of the stored context that a request attends to; empty if it does not."""
        context_id: str = parsed.message.context_id
        return context_id

    @abstractmethod
    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, ReplyTemplate]:
        """Decodes a request; its texts, if it has any, are token ids then.

        Raises:
            EngineError: It is refused.
        """

    def _encode(self, reply: ReplyTemplate, result: Result, request_id: str) -> bytes:
        """The serialized reply to a request with an id, which may be empty."""
        parts = reply.parts(result)
        if request_id:
            content = request_id.encode()
            parts[:0] = field_header(self.id_path, len(content)), content
        return b"".join(parts)

    def _with_reply(self, error: EngineError, request_id: str) -> EngineError:
        """The error of a request in a stream, with what is replied to it."""
        raise NotImplementedError

    def _leading_id(self, message: bytes) -> str:  # noqa: ARG002 - most ids come late
        """The id of a request for which there is no memory to parse it; empty if it comes late."""
        return ""

    async def _decode_and_cache(
        self, parsed: Parsed[Any], call: Call, reservation: Reservation
    ) -> tuple[Request, ReplyTemplate]:
        """Decodes and validates a request that is not in the cache, and caches it."""
        work = partial(self._decode_and_validate, parsed, call, reservation)
        is_large = len(parsed.data) > LARGE_BYTES or self.is_slow(parsed)
        is_large |= self._engine.contexts.reads_files and bool(self._context_id(parsed))
        changes = self._engine.repository.changes
        decoded, request, reply = await self._threads.run(work, call.deadline) if is_large else work()
        # Otherwise the model may have been replaced meanwhile, or be another one for another caller.
        if changes == self._engine.repository.changes and parsed.message.model_name:
            self._cache.put(parsed, decoded, request, reply)
        return request, reply

    def _decode_and_validate(
        self, parsed: Parsed[Any], call: Call, reservation: Reservation
    ) -> tuple[DecodedRequest, Request, ReplyTemplate]:
        message, allowance = parsed.message, Allowance(self._engine.limits, reservation)
        name, version = self._model_name(parsed, call), message.model_version
        model = find_model(self._engine.repository.ready, call, Right.INFER, name, version)
        try:
            view = model
            if stored := self._context_id(parsed):
                view = self._engine.contexts.find(model, stored, call.caller.name)
            decoded, reply = self._decode(parsed, view, call.deadline, allowance)
            decoded.caller = call.caller
            if model.encoder is None:
                model = view
            elif stored:
                _check_comparison(reply)
            return decoded, self._engine.validate(model, decoded), reply
        except Exception as error:
            self._engine.report_failure(model, error, reservation)
            raise

    def _encode_timed(
        self, reply: ReplyTemplate, result: Result, request_id: str, reservation: Reservation
    ) -> bytes:
        """The same as `_encode`, with its time."""
        started = time.monotonic()
        data = self._encode(reply, result, request_id)
        if (timeline := reservation.timeline) is not None:
            timeline.encode_started_at, timeline.encoded_at = started, time.monotonic()
        return data


class CachedRequest:
    """What requests with the same bytes outside their tensors and ids have in common.

    Attributes:
        fixed: These bytes, in parts.
        offsets: Where each part begins.
        id_range: Start and end of the id; None if there is none.
        model: The model, which can be freed.
        plan: Makes the request of the engine.
        arrays: For each of the model's inputs: name, shape, element type, and where its vectors begin.
        reply: Encodes their replies.
    """

    __slots__ = ("arrays", "fixed", "id_range", "model", "offsets", "plan", "reply")

    def __init__(
        self,
        parsed: Parsed[Any],
        model: LoadedModel,
        plan: Plan,
        arrays: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...],
        reply: ReplyTemplate,
    ) -> None:
        data = parsed.data
        ids = parsed.byte_ranges.get(("id",), ())
        vectors = [(start, start + dtype.itemsize * int(np.prod(shape))) for _, shape, dtype, start in arrays]
        differing = sorted([*vectors, *ids])
        starts, ends = [0, *(end for _, end in differing)], [*(start for start, _ in differing), len(data)]
        self.fixed = tuple([data[at:end] for at, end in zip(starts, ends, strict=True)])
        self.offsets = tuple(starts)
        self.id_range = slice(*ids[0]) if ids else None
        self.model = ref(model)
        self.plan, self.arrays, self.reply = plan, arrays, reply


class RequestCache:
    """The requests of one method that were used last. Belongs to the thread of calls."""

    def __init__(self, engine: Engine) -> None:
        """Has no entry yet. All are dropped when models of the repository change."""
        self._repository, self._contexts = engine.repository, engine.contexts
        self._changes = self._repository.changes
        # By size of the message. The size that was used last is the last; of each size, the entry that was
        # used last comes first.
        self._entries: OrderedDict[int, tuple[CachedRequest, ...]] = OrderedDict()

    def get(self, message: bytes, call: Call) -> tuple[Request, ReplyTemplate, str] | None:
        """The request that a message is by its bytes, with the encoder of its reply, and its id.

        None if it has to be decoded, or if the caller lacks the right for its model. The arrays are views of
        the message.
        """
        if self._changes != self._repository.changes:
            self._changes = self._repository.changes
            self._entries.clear()
        size = len(message)
        entries = self._entries.get(size, ())
        for entry in entries:
            if all(map(message.startswith, entry.fixed, entry.offsets)):
                break
        else:
            return None
        model = entry.model()
        if model is None or not has_right(call, Right.INFER, model.name):
            return None
        request_id = ""
        if entry.id_range is not None:
            try:
                request_id = message[entry.id_range].decode()
            except UnicodeDecodeError:
                return None
        if entry is entries[0]:
            self._entries.move_to_end(size)
        else:
            self._use(size, entry)
        caller = call.caller
        if model.context is not None and not self._contexts.use(model.context, caller.name):
            return None
        rows = {}
        for name, shape, dtype, start in entry.arrays:
            rows[name] = np.ndarray(shape, dtype, message, start)
        return entry.plan.make_request(model, rows, call.deadline, caller), entry.reply, request_id

    def put(
        self, parsed: Parsed[Any], decoded: DecodedRequest, request: Request, reply: ReplyTemplate
    ) -> None:
        """Caches a request, unless more than the bytes outside its tensors decides what it is.

        Args:
            parsed: The request as it was received.
            decoded: The decoded request.
            request: The validated request.
            reply: Encodes the reply.
        """
        model = request.model
        if (
            not reply.is_cacheable
            or len(request.plan.sequences) > MAX_SEQUENCES
            or not _is_cacheable(decoded, model)
        ):
            return
        rows = {spec.name: decoded.inputs[spec.name].rows for spec in model.inputs}
        fixed_bytes = len(parsed.data) - sum([array.nbytes for array in rows.values()])
        if not 0 <= fixed_bytes <= MAX_FIXED_BYTES or len(parsed.byte_ranges.get(("id",), ())) > 1:
            return
        # Inputs that are not the very bytes of the message were converted, cut, or sent elsewhere.
        start = _address(np.frombuffer(parsed.data, np.uint8))
        arrays = []
        for name, array in rows.items():
            at = _address(array) - start
            if not (array.flags.c_contiguous and 0 <= at <= len(parsed.data) - array.nbytes):
                return
            arrays.append((name, array.shape, array.dtype, at))
        self._use(len(parsed.data), CachedRequest(parsed, model, request.plan, tuple(arrays), reply))

    def _use(self, size: int, entry: CachedRequest) -> None:
        """Keeps an entry as the most recently used one, in place of the least recently used one."""
        key = (entry.fixed, entry.offsets)
        older = [old for old in self._entries.get(size, ()) if (old.fixed, old.offsets) != key]
        self._entries[size] = (entry, *older[: MAX_ALIKE - 1])
        self._entries.move_to_end(size)
        if len(self._entries) > CACHED_SIZES:
            self._entries.popitem(last=False)


def _check_comparison(reply: ReplyTemplate) -> None:
    """Refuses a request with stored documents that would not be compared with them."""
    if reply.steps is None:
        raise InvalidRequestError(CONTEXT_ID, "has documents, and the request no texts to compare with them")


def _is_cacheable(decoded: DecodedRequest, model: LoadedModel) -> bool:
    """Whether the validity of a request depends only on the lengths of its sequences."""
    if decoded.texts or decoded.mask or decoded.spans or decoded.offsets or decoded.head_selection:
        return False
    return not model.manifest.refuses_nan and not any(
        spec.name == POSITIONS or spec.exclusive_upper_bound is not None or spec.data_type == "bool"
        for spec in model.inputs
    )


def _address(array: Array) -> int:
    """Where the elements of an array begin in memory."""
    address: int = array.__array_interface__["data"][0]
    return address
