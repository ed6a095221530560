"""attention.v1: the typed service."""

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from protos.attention.v1 import attention_pb2 as pb
from protos.attention.v1 import attention_pb2_grpc
from server.engine.engine import Engine
from server.engine.errors import EngineError, OverloadedError
from server.engine.values import Result
from server.rpc import attention_codec, calls
from server.rpc.model_codec import describe
from server.rpc.status import UNEXPECTED, code_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """One request of a stream, on its way."""

    id: str
    outcome: Future[Result] | EngineError


class AttentionService(attention_pb2_grpc.AttentionServiceServicer):
    """Decodes, submits, waits, encodes."""

    def __init__(self, engine: Engine, *, max_streams: int, stream_window: int) -> None:
        """Makes the service.

        Args:
            engine: Computes the answers.
            max_streams: Streams open at a time; each holds two threads.
            stream_window: Requests of one stream that may be on their way at a time.
        """
        self._engine = engine
        self._streams = threading.BoundedSemaphore(max_streams)
        self._max_streams = max_streams
        self._stream_window = stream_window

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext) -> pb.AttendResponse:
        """One request, one answer."""
        until = calls.deadline(context)
        future = self._submit(request, until, run_here=True)
        calls.cancel_when_left(future, context)
        response = pb.AttendResponse()
        attention_codec.encode(calls.wait(future, until), response)
        return response

    def AttendStream(
        self, request_iterator: Iterator[pb.AttendStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttendStreamResponse]:
        """Many requests, answered in their order; the next ones are read while the first is computed."""
        if not self._streams.acquire(blocking=False):
            raise OverloadedError(
                f"{self._max_streams} streams are open, which is the limit; try again later"
            )
        try:
            yield from self._answer(request_iterator, calls.deadline(context))
        finally:
            self._streams.release()

    def _answer(
        self, requests: Iterator[pb.AttendStreamRequest], until: float
    ) -> Iterator[pb.AttendStreamResponse]:
        window: queue.Queue[_Pending | None] = queue.Queue(self._stream_window)
        threading.Thread(
            target=self._read, args=(requests, until, window), name="stream-reader", daemon=True
        ).start()
        try:
            while (pending := window.get()) is not None:
                yield _answer_one(pending, until)
        finally:
            # Where the caller left early: what is on its way is given up, and the reader, which may wait
            # for room in the window, comes to its end.
            while pending is not None:
                if isinstance(pending.outcome, Future):
                    pending.outcome.cancel()
                pending = window.get()

    def _read(
        self,
        requests: Iterator[pb.AttendStreamRequest],
        until: float,
        window: "queue.Queue[_Pending | None]",
    ) -> None:
        """Submits what the caller sends, as far ahead as the window allows."""
        try:
            for message in requests:
                window.put(_Pending(message.id, self._try_to_submit(message.request, until)))
        except grpc.RpcError:  # the caller cancelled or its connection broke
            pass
        finally:
            window.put(None)

    def _submit(self, request: pb.AttendRequest, until: float, *, run_here: bool = False) -> Future[Result]:
        model = self._engine.repository.ready(request.model_name, request.model_version)
        decoded = attention_codec.decode(request, until, attention_codec.roles(model))
        return self._engine.submit(decoded, run_here=run_here)

    def _try_to_submit(self, request: pb.AttendRequest, until: float) -> Future[Result] | EngineError:
        try:
            return self._submit(request, until)
        except EngineError as error:
            return error
        except Exception:
            log.exception("stream request failed")
            return EngineError(UNEXPECTED)

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        """Every model."""
        return pb.ListModelsResponse(models=[describe(model) for model in self._engine.repository])

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        """One model."""
        return pb.GetModelResponse(
            model=describe(self._engine.repository.find(request.name, request.version))
        )


def _answer_one(pending: _Pending, until: float) -> pb.AttendStreamResponse:
    response = pb.AttendStreamResponse(id=pending.id)
    try:
        if isinstance(pending.outcome, EngineError):
            raise pending.outcome
        attention_codec.encode(calls.wait(pending.outcome, until), response.response)
    except EngineError as error:
        response.error.code = code_of(error).value[0]
        response.error.reason = error.reason
        response.error.message = error.message
        response.error.field = error.field
    return response
