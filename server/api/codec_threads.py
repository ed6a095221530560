"""Threads that decode large requests and encode large replies, away from the thread that takes calls."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from attention_serving.server import thread_names
from attention_serving.server.api.method import LARGE_BYTES, parse
from attention_serving.server.api.protobuf_bytes import Parsed
from attention_serving.server.coroutines import Task, suspend
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.engine.types import Result
from attention_serving.server.records import RequestRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
# Replies of more bytes are encoded on the codec threads. To encode that much takes less than a millisecond.
LARGE_REPLY_BYTES = 1 << 20
# While one thread waits for the interpreter, another works in NumPy or in the tokenizer. More of them would
# take the interpreter from the thread that takes calls.
THREADS = 2
# The threads are daemons: one that is in the middle of a long text does not delay the end of the process.
JOIN_SECONDS = 1.0


class _Work:
    """A function and what became of it."""

    __slots__ = ("_deadline", "_function", "_task", "error", "result")
    _task: Task

    def __init__(self, function: Callable[[], Any], deadline: float) -> None:
        self._function, self._deadline = function, deadline
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Runs on a codec thread. Work for a call that has ended is dropped."""
        try:
            if not self._task.is_closed:
                self._check_deadline()
                self.result = self._function()
        except BaseException as error:
            self.error = error
        self._task.wake()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlineExceededError("the deadline passed while the request waited for a codec thread")

    def queue(self, queue: "SimpleQueue[_Work | None]", task: Task) -> None:
        """Hands it to the threads. What it works on stays until it is done, even if its call ends."""
        self._task = task
        task.hold()
        queue.put(self)


class CodecThreads:
    """A few threads that work in the order in which work arrives.

    A caller of many large requests delays the large requests that arrive after them, and no small ones.
    """

    def __init__(self, count: int = THREADS) -> None:
        """Starts the threads.

        Args:
            count: Number of threads, at least 1.
        """
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="codec", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[[], T], deadline: float) -> T:
        """Calls a function on one of the threads, and returns or raises what it does.

        Args:
            function: The function.
            deadline: When nobody waits for it any more, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: The deadline had passed when its turn came.
        """
        work = _Work(function, deadline)
        await suspend(lambda task: work.queue(self._queue, task))
        # An error refers to frames that refer to this work: neither may keep the other alive.
        error, work.error = work.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        result: T = work.result
        return result

    async def parse(self, read: Callable[[bytes], T], message: bytes, deadline: float) -> T:
        """Parses a request: on one of the threads if it is large.

        Args:
            read: Parses it; raises DecodeError.
            message: The request.
            deadline: See `run`.

        Raises:
            MalformedMessageError: The bytes are not a message of the method's type.
        """
        work = partial(parse, read, message)
        return await self.run(work, deadline) if len(message) > LARGE_BYTES else work()

    async def decode(
        self, work: Callable[[], T], parsed: Parsed[Any], deadline: float, *, is_slow: bool
    ) -> T:
        """Decodes a parsed request: on one of the threads if it is large.

        Args:
            work: Decodes it.
            parsed: The request.
            deadline: See `run`.
            is_slow: Whether that takes long although the request is not large.
        """
        return await self.run(work, deadline) if is_slow or len(parsed.data) > LARGE_BYTES else work()

    async def encode(
        self, encode: Callable[[Result], bytes], result: Result, reservation: Reservation, deadline: float
    ) -> bytes:
        """Encodes a reply: on one of the threads if it is large.

        Args:
            encode: Encodes it.
            result: The result.
            reservation: That of the request. Its record is told how long the reply took.
            deadline: See `run`.
        """
        record = reservation.timeline
        work = partial(encode, result)
        if isinstance(record, RequestRecord):
            work = partial(_recorded, work, record)
        # Most results are small, which their reservation tells.
        if reservation.size > LARGE_REPLY_BYTES and _padded_bytes(result) > LARGE_REPLY_BYTES:
            return await self.run(work, deadline)
        return work()

    def close(self) -> None:
        """Ends the threads after the work that they have taken. Work that has not begun may be dropped."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        thread_names.publish()
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # it may hold a message, which must go before the thread waits


def _recorded(work: Callable[[], bytes], record: RequestRecord) -> bytes:
    started = time.monotonic()
    reply = work()
    record.encoded(started, len(reply))
    return reply


def _padded_bytes(result: Result) -> int:
    """Size of a reply in which each output is padded to its largest sequence."""
    outputs = result.outputs.values()
    return sum([len(arrays) * max([array.nbytes for array in arrays]) for arrays in outputs])
