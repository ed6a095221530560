"""The synchronous client's connection and its streams, on grpcio's channels and on threads."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, Self

import grpc

from attention_client._connection.base import BaseConnection, finish
from attention_client._connection.streams import (
    Entry,
    Outcome,
    StreamEnd,
    StreamItem,
    StreamSettings,
    encode_item,
    idle_too_long,
    iterator_of,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions
from attention_client.errors import AttentionClientError, from_rpc_error


class SyncExchange:
    """A stream whose requests a thread of gRPC reads and sends."""

    def __init__(
        self, open_call: Callable[..., Any], items: Iterator[StreamItem], settings: StreamSettings
    ) -> None:
        self.failure: BaseException | None = None
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self.slots = threading.Semaphore(settings.max_in_flight)
        self._stopped = threading.Event()
        self._call = open_call(self._requests(items, settings.options))
        # Wakes a receiver that waits for the next request of a slow iterable.
        if not self._call.add_callback(lambda: self._entries.put(StreamEnd.CALL_ENDED)):
            self._entries.put(StreamEnd.CALL_ENDED)
        # gRPC does not limit the wait for one response.
        self._waits_since: float | None = None
        self._too_long: AttentionClientError | None = None
        if (limit := settings.idle_timeout) is not None:
            threading.Thread(target=self._watch, args=(limit,), name="attention-idle", daemon=True).start()

    def _requests(
        self, items: Iterator[StreamItem], options: RequestOptions
    ) -> Iterator[pb.AttendStreamRequest]:
        """Reads until the items end or the stream is stopped."""
        for index in itertools.count():
            self.slots.acquire()
            if self._stopped.is_set():
                break
            try:
                entry, request = encode_item(index, next(items), options)
            except StopIteration:
                break
            except BaseException as error:  # raised again, in the caller's thread
                self.failure = error
                break
            self._entries.put(entry)
            if request is not None:
                yield request
        self._entries.put(StreamEnd.INPUT_ENDED)

    async def next_entry(self) -> Entry:
        """See Exchange."""
        return self._entries.get()

    async def read(self) -> pb.AttendStreamResponse | None:
        """See Exchange."""
        self._waits_since = time.monotonic()
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise self._too_long or from_rpc_error(error) from None
        finally:
            self._waits_since = None

    async def stop(self) -> None:
        """See Exchange. An iterable that is blocked now is read up to its next item."""
        self._stopped.set()
        self.slots.release()
        self._call.cancel()

    def _watch(self, limit: float) -> None:
        """Cancels the call if the next response takes too long."""
        remaining = limit
        while not self._stopped.wait(remaining):  # wakes once per limit while responses arrive
            since = self._waits_since
            remaining = limit if since is None else since + limit - time.monotonic()
            if remaining <= 0:
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
    _sleep = staticmethod(time.sleep)
    _run = staticmethod(finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Calls in progress and later calls raise ClientClosedError."""
        finish(self._close_channels())

    async def _wait(self, result: Any) -> Any:
        return result

    def _stream(self, requests: Any, settings: StreamSettings) -> Generator[Outcome, None, None]:
        outcomes = self._outcomes(iterator_of(requests), settings)

        def run() -> Generator[Outcome, None, None]:
            try:
                with suppress(StopAsyncIteration):
                    while True:
                        yield finish(anext(outcomes))
            finally:
                finish(outcomes.aclose())

        return run()
