"""Channels that are replaced when certificates are renewed, without an effect on the calls in progress."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from attention_client._tls import Credentials, TlsFiles

ChannelT = TypeVar("ChannelT")


class Link(Generic[ChannelT]):
    """One channel of gRPC, and the calls on it.

    Attributes:
        channel: The channel.
        calls: Number of calls in progress.
    """

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.calls = 0
        self._methods: dict[tuple[str, str], Any] = {}

    def method(self, kind: str, path: str, options: dict[str, Any]) -> Any:
        """A method of the server on this channel, made when it is first called."""
        if (kind, path) not in self._methods:
            self._methods[kind, path] = getattr(self.channel, kind)(path, **options)
        return self._methods[kind, path]


class RenewingChannel(Generic[ChannelT]):
    """What stubs need of a channel. Calls use the current one; a replaced one closes after its last call."""

    def __init__(self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], ChannelT]) -> None:
        """Opens the first channel.

        Args:
            files: Certificates, which may be renewed.
            open_channel: Opens a channel with credentials.

        Raises:
            InvalidArgumentError: The files cannot be used.
        """
        self._credentials = Credentials(files)
        self._open = open_channel
        self._lock = threading.Lock()
        self._current = Link(open_channel(self._credentials.current))
        # Those that were replaced and still have calls.
        self._retired: set[Link[ChannelT]] = set()
        self._is_closed = False

    def _method(self, kind: str, path: str, **options: Any) -> Callable[..., Any]:
        return partial(self._call, kind, path, options)

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_stream = partialmethod(_method, "stream_stream")

    def _call(self, kind: str, path: str, options: dict[str, Any], *arguments: Any, **given: Any) -> Any:
        link = self._acquire()
        release = partial(self._release, link)
        try:
            call = link.method(kind, path, options)(*arguments, **given)
        except BaseException:
            release()
            raise
        self._when_ended(call, release)
        return call

    def _acquire(self) -> Link[ChannelT]:
        """The channel for a call that begins. `_release` follows when the call has ended."""
        idle = None
        with self._lock:
            if not self._is_closed and self._credentials.renewed():
                if self._current.calls:
                    self._retired.add(self._current)
                else:
                    idle = self._current
                self._current = Link(self._open(self._credentials.current))
            link = self._current
            link.calls += 1
        if idle is not None:
            self._close_soon(idle.channel)
        return link

    def _release(self, link: Link[ChannelT]) -> None:
        """A call has ended. For any thread."""
        with self._lock:
            link.calls -= 1
            is_idle = link in self._retired and not link.calls
            if is_idle:
                self._retired.discard(link)
        if is_idle:
            self._close_soon(link.channel)

    def _channels(self) -> list[ChannelT]:
        """Makes no more channels; returns those that are left, to be closed."""
        with self._lock:
            self._is_closed = True
            left, self._retired = [self._current, *self._retired], set()
            return [link.channel for link in left]

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        raise NotImplementedError

    def _close_soon(self, channel: ChannelT) -> None:
        raise NotImplementedError


class SyncRenewingChannel(RenewingChannel[grpc.Channel]):
    """Of grpcio's channels."""

    def close(self) -> None:
        """Closes every channel. Calls in progress are cancelled."""
        for channel in self._channels():
            channel.close()

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        # A unary call has ended: it returned its response.
        if not (isinstance(call, grpc.RpcContext) and call.add_callback(release)):
            release()

    def _close_soon(self, channel: grpc.Channel) -> None:
        """Closes a channel on another thread: the last call may have ended on the channel's own thread."""
        threading.Thread(target=channel.close, name="close", daemon=True).start()


class AsyncRenewingChannel(RenewingChannel[aio.Channel]):
    """Of grpc.aio's channels, on one event loop."""

    def __init__(
        self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], aio.Channel]
    ) -> None:
        """As of `RenewingChannel`."""
        super().__init__(files, open_channel)
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Closes every channel. Calls in progress are cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._channels()), *self._closing)

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        call.add_done_callback(lambda _: release())

    def _close_soon(self, channel: aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
