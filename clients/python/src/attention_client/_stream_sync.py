"""A bidirectional stream on threads: changes with how the synchronous client uses grpc's threads.

grpc's thread reads the caller's iterable and sends; the caller's thread receives. Entries (see
streaming.py) pass from the first to the second, and the slots of `max_in_flight` back.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import grpc

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._streaming import (
    Entry,
    Mark,
    Outcome,
    Sent,
    StreamPlan,
    decode_answer,
    encode_item,
    ended_early,
    idle_too_long,
)
from attention_client._values import StreamItem
from attention_client.errors import AttentionClientError, from_rpc_error


class StreamCall(Protocol):
    """What is used of grpc's call."""

    def __next__(self) -> pb.AttendStreamResponse:
        """Waits for the next answer."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has the call's end reported; False where it has ended already."""

    def cancel(self) -> bool:
        """Ends the call."""


OpenCall = Callable[[Iterator[pb.AttendStreamRequest], float | None], StreamCall]


def attend_stream(
    open_call: OpenCall, items: Iterator[StreamItem], plan: StreamPlan
) -> Generator[Outcome, None, None]:
    """Runs one stream; closing the generator cancels the call and stops the reading."""
    requests = _Requests(items, plan)
    call = open_call(requests, plan.timeout)
    idle = _IdleWatch(call, plan.idle_timeout)
    if not call.add_callback(requests.call_ended):
        requests.call_ended()
    try:
        yield from _outcomes(requests, call, idle, plan)
        _finish(call, idle)
        if requests.failure is not None:
            raise requests.failure
    finally:
        requests.stop()
        idle.stop()
        call.cancel()


def _outcomes(
    requests: "_Requests", call: StreamCall, idle: "_IdleWatch", plan: StreamPlan
) -> Generator[Outcome, None, None]:
    while (entry := requests.entries.get()) is not Mark.INPUT_ENDED:
        outcome = entry if isinstance(entry, AttentionClientError) else _receive(entry, requests, call, idle)
        requests.free_slot()
        if isinstance(outcome, AttentionClientError) and not plan.return_exceptions:
            raise outcome
        yield outcome


def _receive(entry: Sent | Mark, requests: "_Requests", call: StreamCall, idle: "_IdleWatch") -> Outcome:
    """Waits for one answer. After the call's end there is none, and grpc says why."""
    try:
        with idle.waiting():
            answer = next(call)
    except (grpc.RpcError, StopIteration) as error:
        broken = idle.failure or _call_error(error)
    else:
        if isinstance(entry, Mark):
            raise ended_early()
        return decode_answer(answer, entry)
    # What the caller's own iterable raised comes first: it says more than a call that broke as well.
    raise requests.failure or broken


def _finish(call: StreamCall, idle: "_IdleWatch") -> None:
    """Lets the server end the call. All answers are here: what goes wrong now changes none of them."""
    with suppress(grpc.RpcError, StopIteration), idle.waiting():
        next(call)


def _call_error(error: Exception) -> AttentionClientError:
    return from_rpc_error(error) if isinstance(error, grpc.RpcError) else ended_early()


class _Requests(Iterator[pb.AttendStreamRequest]):
    """The requests of a stream, made from the caller's items as slots get free.

    Attributes:
        entries: What became of each item, in order.
        failure: What the caller's iterable raised.
    """

    def __init__(self, items: Iterator[StreamItem], plan: StreamPlan) -> None:
        self.entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._items = zip(itertools.count(), items, strict=False)
        self._ask = plan.ask
        self._slots = threading.Semaphore(plan.max_in_flight)
        self._stopped = False

    def __next__(self) -> pb.AttendStreamRequest:
        while True:
            self._slots.acquire()
            entry, request = self._read()
            self.entries.put(entry)
            if request is not None:
                return request
            if entry is Mark.INPUT_ENDED:
                raise StopIteration

    def _read(self) -> tuple[Entry, pb.AttendStreamRequest | None]:
        if self._stopped:
            return Mark.INPUT_ENDED, None
        try:
            index, item = next(self._items)
            return encode_item(index, item, self._ask)
        except StopIteration:
            return Mark.INPUT_ENDED, None
        except BaseException as error:  # raised again, in the caller's thread
            self.failure = error
            return Mark.INPUT_ENDED, None

    def free_slot(self) -> None:
        """Lets one more item be read."""
        self._slots.release()

    def call_ended(self) -> None:
        """Wakes a receiver that waits for the next item of a slow iterable."""
        self.entries.put(Mark.CALL_ENDED)

    def stop(self) -> None:
        """Ends the reading; an iterable that is blocked at this moment is read to its next item."""
        self._stopped = True
        self._slots.release()


class _IdleWatch:
    """Cancels a call whose next answer is awaited for too long; grpc itself has no such limit.

    Attributes:
        failure: The error to raise, once it has cancelled the call.
    """

    def __init__(self, call: StreamCall, limit: float | None) -> None:
        self.failure: AttentionClientError | None = None
        self._call, self._limit = call, limit
        self._since: float | None = None
        self._stopped = threading.Event()
        if limit is not None:
            threading.Thread(target=self._run, args=(limit,), name="attention-idle", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the block as a wait for one answer."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _run(self, limit: float) -> None:
        left = limit
        while not self._stopped.wait(left):  # wakes once per limit while answers flow
            since = self._since
            left = limit if since is None else since + limit - time.monotonic()
            if left <= 0:
                self.failure = idle_too_long(limit)
                self._call.cancel()
                return
