"""One request of a call and its reply: handled at once, or on the codec threads if either is large.

A request that is known (`known_requests.py`) is handled at once, however large it is.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import DeadlineExceededError, OverloadedError
from attention_serving.server.engine.types import Result
from attention_serving.server.rpc.calls.deferred import DeferredReply, wait
from attention_serving.server.rpc.calls.intake import LARGE_BYTES, LARGE_REPLY_BYTES, Intake
from attention_serving.server.rpc.calls.route import Route
from attention_serving.server.rpc.records import RequestRecord
from attention_serving.server.rpc.transport.seam import Call


class Exchange:
    """A request and its reply, until the reply has been sent. Runs on the transport's thread unless noted.

    Memory is reserved when the message has been received. It is released when `release` is called or the
    call ends, but not while a codec thread works on the message.

    Attributes:
        done: Whether `content` returns or raises.
    """

    __slots__ = (
        "_call",
        "_error",
        "_left",
        "_record",
        "_reply",
        "_reservation",
        "_route",
        "_then",
        "_working",
        "done",
    )

    def __init__(self, call: Call, route: Route, then: "Callable[[Exchange], object]") -> None:
        """Creates an exchange that has no request yet.

        Args:
            call: The call.
            route: Handles the request.
            then: Called with the exchange once it is done.
        """
        self.done = False
        self._call = call
        self._route = route
        self._then = then
        self._reply: Any = None
        self._error: BaseException | None = None
        self._reservation: Reservation | None = None
        self._record: RequestRecord | None = None
        self._working = self._left = False

    @property
    def failed(self) -> bool:
        """Whether the request ended with an error of the call."""
        return self._error is not None

    def receive(self, message: bytes) -> None:
        """Handles the request."""
        if self._call.record is not None:
            self._record = self._call.record.received(len(message))
        try:
            if self._route.intake is None:
                reply = self._route.handle(self._route.parse(message), self._call)
            elif not self._reserve(self._route.intake, message):
                return
            elif (recalled := self._route.recall(message)) is not None:
                reply = self._handle(recalled)
            elif len(message) > LARGE_BYTES:
                self._offload(partial(self._decode, message))
                return
            else:
                request = self._route.parse(message)
                if self._route.is_slow(request):
                    self._offload(partial(self._handle, request))
                    return
                reply = self._handle(request)
        except Exception as error:
            self._fail(error)
        else:
            self.answer(reply)

    def answer(self, reply: Any) -> None:
        """Takes the reply: a message, its serialized form, or one that comes later."""
        self._reply = reply
        if isinstance(reply, DeferredReply):
            wait(self._call, reply, self._resolved)
        else:
            self._finish()

    def content(self) -> bytes:
        """The serialized reply, once.

        Raises:
            BaseException: What the request ended with.
        """
        # An error refers to frames that refer to this exchange: neither may keep the other alive.
        error, self._error = self._error, None
        if error is not None:
            raise error
        reply, self._reply = self._reply, None
        if isinstance(reply, DeferredReply):
            return self._encode(reply)
        data = self._route.serialize(reply)
        if self._record is not None:
            self._record.sent_bytes = len(data)
        return data

    def release(self) -> None:
        """Frees the memory of the request: its reply has been sent."""
        if self._record is not None and self._call.record is not None:
            self._call.record.request_ended(self._record)
        if self._reservation is not None:
            self._call.remove_done_callback(self._leave)
            self._leave()

    def _reserve(self, intake: Intake, message: bytes) -> bool:
        try:
            self._reservation = intake.budget.reserve(len(message), self._call.account)
        except OverloadedError as error:
            if self._route.refuse is None:
                raise
            if self._record is not None:
                self._record.failed(error)
            self.answer(self._route.refuse(message, error))
            return False
        self._reservation.timeline = self._record
        self._call.add_done_callback(self._leave)
        return True

    def _leave(self) -> None:
        """The call has ended, or the reply has been sent."""
        self._left = True
        if not self._working:
            self._clear()

    def _clear(self) -> None:
        """Frees everything. Both threads may come here; each of the steps may be done twice."""
        reply, self._reply, self._error = self._reply, None, None
        if isinstance(reply, DeferredReply):
            reply.future.cancel()
        if self._reservation is not None:
            self._reservation.release()

    def _decode(self, message: bytes) -> Any:
        return self._handle(self._route.parse(message))

    def _handle(self, request: Any) -> Any:
        return self._route.handle(request, self._call, self._reservation)

    def _encode(self, reply: DeferredReply) -> bytes:
        if self._record is None:
            return self._route.serialize(reply.encode(reply.future))
        started = time.monotonic()
        data = self._route.serialize(reply.encode(reply.future))
        self._record.encoded(started, len(data))
        return data

    def _resolved(self, future: "Future[Result]") -> None:
        reply = self._reply
        if self._record is not None and not future.cancelled() and (error := future.exception()) is not None:
            self._record.failed(error)
        if self._may_be_large() and _is_large(future):
            self._reply = None
            self._offload(partial(self._encode, reply))
        else:
            self._finish()

    def _may_be_large(self) -> bool:
        """Whether more than a small result is reserved; routes without an intake reserve nothing."""
        return self._reservation is not None and self._reservation.size > LARGE_REPLY_BYTES

    def _offload(self, work: Callable[[], Any]) -> None:
        """Has a codec thread make the reply."""
        if self._route.intake is None:
            raise TypeError("only routes with an intake have codec threads")
        self._working = True
        self._route.intake.threads.submit(partial(self._work, work))

    def _work(self, work: Callable[[], Any]) -> None:
        """Runs on a codec thread, when its turn has come. Work for a call that has ended is dropped."""
        try:
            if self._call.ended_with is None:
                self._check_deadline()
                self._reply = work()
        except BaseException as error:
            self._error = error
        # In this order: if the call ends now, at least one of the threads sees what the other has set.
        self._working = False
        if self._left:
            self._clear()
        self._call.call_soon_threadsafe(self._worked)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._call.deadline:
            raise DeadlineExceededError("the deadline passed while the request waited for a codec thread")

    def _worked(self) -> None:
        if self._left or self._call.ended_with is not None:
            return
        if self._error is not None:
            self._finish()
        else:
            self.answer(self._reply)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.done = True
        self._then(self)


def _is_large(future: "Future[Result]") -> bool:
    """Whether the reply of a resolved future is large, if each output is padded to its largest sequence."""
    if future.cancelled() or future.exception() is not None:
        return False
    size = 0
    for arrays in future.result().outputs.values():
        size += len(arrays) * max([array.nbytes for array in arrays])
    return size > LARGE_REPLY_BYTES
