"""The synchronous client's connection and its streams, on grpcio's channels and on threads."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, Self

import grpc

from attention_client._connection.base import BaseConnection, Channel, finish
from attention_client._connection.streams import (
    Entry,
    Outcome,
    StreamEnd,
    StreamSettings,
    encode_item,
    idle_too_long,
    iterator_of,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import StreamItem
from attention_client.errors import AttentionClientError, from_rpc_error


class SyncExchange(Iterator[pb.AttendStreamRequest]):
    """A stream whose requests a thread of gRPC reads and sends, by iterating over this object."""

    def __init__(
        self, open_call: Callable[..., Any], items: Iterator[StreamItem], settings: StreamSettings
    ) -> None:
        self.failure: BaseException | None = None
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._items = zip(itertools.count(), items, strict=False)
        self._options = settings.options
        self.slots = threading.Semaphore(settings.max_in_flight)
        self._stopped = threading.Event()
        self._call = open_call(self)
        if not self._call.add_callback(self._call_ended):
            self._call_ended()
        # gRPC does not limit the wait for one response.
        self._waits_since: float | None = None
        self._too_long: AttentionClientError | None = None
        if (limit := settings.idle_timeout) is not None:
            threading.Thread(target=self._watch, args=(limit,), name="attention-idle", daemon=True).start()

    def __next__(self) -> pb.AttendStreamRequest:
        while True:
            self.slots.acquire()
            entry, request = self._encode_next()
            self._entries.put(entry)
            if request is not None:
                return request
            if entry is StreamEnd.INPUT_ENDED:
                raise StopIteration

    def _encode_next(self) -> tuple[Entry, pb.AttendStreamRequest | None]:
        if self._stopped.is_set():
            return StreamEnd.INPUT_ENDED, None
        try:
            index, item = next(self._items)
            return encode_item(index, item, self._options)
        except StopIteration:
            return StreamEnd.INPUT_ENDED, None
        except BaseException as error:  # raised again, in the caller's thread
            self.failure = error
            return StreamEnd.INPUT_ENDED, None

    def _call_ended(self) -> None:
        """Wakes a receiver that waits for the next request of a slow iterable."""
        self._entries.put(StreamEnd.CALL_ENDED)

    async def next_entry(self) -> Entry:
        """See Exchange."""
        return self._entries.get()

    async def read(self) -> pb.AttendStreamResponse | None:
        """See Exchange."""
        self._waits_since = time.monotonic()
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise self._too_long or from_rpc_error(error) from error
        finally:
            self._waits_since = None

    async def stop(self) -> None:
        """See Exchange. An iterable that is blocked now is read up to its next item."""
        self._stopped.set()
        self.slots.release()
        self._call.cancel()

    def _watch(self, limit: float) -> None:
        """Cancels the call if the next response takes too long."""
        left = limit
        while not self._stopped.wait(left):  # wakes once per limit while responses arrive
            since = self._waits_since
            left = limit if since is None else since + limit - time.monotonic()
            if left <= 0:
                self._too_long = idle_too_long(limit)
                self._call.cancel()
                return


class BlockingLock:
    """A lock that the steps of a call wait for without awaiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class Connection(BaseConnection):
    """A connection whose calls block."""

    _grpc = grpc
    _exchange = SyncExchange
    _new_lock = BlockingLock
    _run = staticmethod(finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Calls in progress and later calls raise ClientClosedError."""
        for each in self._all_channels():
            each.channel.close()

    async def _send(self, method: Any, request: Any, **options: Any) -> Any:
        return method(request, **options)

    async def _pause(self, duration: float) -> None:
        time.sleep(duration)

    async def _close(self, channel: Channel) -> None:
        channel.channel.close()

    def _stream(self, requests: Any, settings: StreamSettings) -> Generator[Outcome, None, None]:
        found = self._outcomes(iterator_of(requests), settings)

        def run() -> Generator[Outcome, None, None]:
            try:
                with suppress(StopAsyncIteration):
                    while True:
                        yield finish(anext(found))
            finally:
                finish(found.aclose())

        return run()
