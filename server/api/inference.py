"""How a request of inference is answered, by every method of both protocols: decode, run, encode."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import (
    LARGE_BYTES,
    CallKind,
    MalformedMessageError,
    Method,
    find_model,
    parse,
)
from attention_serving.server.api.protobuf_bytes import Parsed, reader
from attention_serving.server.api.request_cache import RequestCache
from attention_serving.server.api.tensors import Allowance, Reply
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.observe.records import RequestRecord
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# Replies of more bytes are encoded on the codec threads. To encode that much takes less than a millisecond.
LARGE_REPLY_BYTES = 1 << 20


class Inference(ABC):
    """A method of inference. Its subclasses know a protocol.

    Attributes:
        kind: The type of its messages.
        within: The field of a message that is the request; empty if the message is.
        paths: What is cut out of a request.
        is_stream: Whether its requests are those of a stream, where the reply to one that fails is an error,
            and the stream goes on.
    """

    kind: ClassVar[Any]
    within: ClassVar[str] = ""
    paths: ClassVar[Sequence[str]]
    is_stream: ClassVar[bool] = False

    def __init__(self, engine: Engine, threads: CodecThreads) -> None:
        """Creates the method.

        Args:
            engine: Computes results.
            threads: Decode and encode what is large.
        """
        self._engine, self._threads = engine, threads
        self._read = reader(self.kind, self.paths, engine.limits.max_sequences, self.within)
        self._cache = RequestCache(engine.repository)

    def method(self) -> Method:
        """What the server knows of the method."""
        return Method(
            kind=CallKind.ORDERED_STREAM if self.is_stream else CallKind.UNARY,
            handle=self.handle,
            is_inference=True,
            right=Right.INFER,
            budget=self._engine.budget,
        )

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        request_id = None
        try:
            if known := self._cache.get(message, call):
                request, reply, request_id = known
                if call.identity is not None:
                    call.identity.require_model(Right.INFER, request.model.name)
                result = await self._engine.run(request, reservation, len(message))
            else:
                reservation.add(len(message))
                parsed = await self._parsed(message, call)
                request_id = parsed.id
                request, reply = await self._decoded(parsed, call, reservation)
                result = await self._run_in_time(request, call, reservation)
            if reservation.timeline is None and reservation.size <= LARGE_REPLY_BYTES:
                return self._encode(reply, result, request_id)
            return await self._encoded_aside(reply, result, request_id, call, reservation)
        except MalformedMessageError:
            raise
        except Exception as error:
            if not self.is_stream:
                raise
            if isinstance(reservation.timeline, RequestRecord):
                reservation.timeline.failed(error)
            return self._failed(self._leading_id(message) if request_id is None else request_id, error)

    @abstractmethod
    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        """Decodes a request; its texts, if it has any, are token ids then.

        Raises:
            EngineError: It is refused.
        """

    @abstractmethod
    def _is_slow(self, parsed: Parsed[Any]) -> bool:
        """Whether a request takes long to decode even if it is not large."""

    @abstractmethod
    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        """The serialized reply to a request with an id."""

    def _failed(self, request_id: str, error: Exception) -> bytes:
        """What is replied, in a stream, to a request that failed."""
        raise NotImplementedError

    def _leading_id(self, message: bytes) -> str:  # noqa: ARG002 - most ids come late
        """The id of a request for which there is no memory to parse it; empty if it comes late."""
        return ""

    async def _parsed(self, message: bytes, call: Call) -> Parsed[Any]:
        work = partial(parse, self._read, message)
        return await self._threads.run(work, call.deadline) if len(message) > LARGE_BYTES else work()

    async def _decoded(
        self, parsed: Parsed[Any], call: Call, reservation: Reservation
    ) -> tuple[ValidatedRequest, Reply]:
        """A request that is not recognised. The next one of its form will be."""
        work = partial(self._validated, parsed, call, reservation)
        is_large = len(parsed.data) > LARGE_BYTES or self._is_slow(parsed)
        decoded, request, reply = await self._threads.run(work, call.deadline) if is_large else work()
        self._cache.keep(parsed, decoded, request, reply)
        return request, reply

    def _validated(
        self, parsed: Parsed[Any], call: Call, reservation: Reservation
    ) -> tuple[Request, ValidatedRequest, Reply]:
        message, allowance = parsed.message, Allowance(self._engine.limits, reservation)
        name, version = message.model_name, message.model_version
        model = find_model(self._engine.model, call, Right.INFER, name, version)
        try:
            request, reply = self._decode(parsed, model, call.deadline, allowance)
            request.caller = ANYONE if call.identity is None else call.identity.caller
            return request, self._engine.validate(model, request), reply
        except Exception as error:
            self._engine.refused(model, error, reservation)
            raise

    async def _run_in_time(self, request: ValidatedRequest, call: Call, reservation: Reservation) -> Result:
        """Runs a request, which may have a timeout of its own and then fails at that."""
        if request.deadline >= call.deadline:
            return await self._engine.run(request, reservation)
        cancel_timer = call.transport.call_at(request.deadline, partial(self._engine.expire, request))
        try:
            return await self._engine.run(request, reservation)
        finally:
            cancel_timer()

    async def _encoded_aside(
        self, reply: Reply, result: Result, request_id: str, call: Call, reservation: Reservation
    ) -> bytes:
        """A reply that may be large, or whose encoding is recorded."""

        def work() -> bytes:
            started = time.monotonic()
            data = self._encode(reply, result, request_id)
            if isinstance(reservation.timeline, RequestRecord):
                reservation.timeline.encoded(started, len(data))
            return data

        # Most results are small, which their reservation tells.
        is_large = reservation.size > LARGE_REPLY_BYTES and _padded_bytes(result) > LARGE_REPLY_BYTES
        return await self._threads.run(work, call.deadline) if is_large else work()


def _padded_bytes(result: Result) -> int:
    """Size of a reply in which each output is padded to its largest sequence."""
    outputs = result.outputs.values()
    return sum([len(arrays) * max([array.nbytes for array in arrays]) for arrays in outputs])
