"""Channels that are replaced when certificates are renewed, without an effect on the calls in progress."""

import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import grpc

from attention_client._tls import Credentials, TlsFiles

ChannelT = TypeVar("ChannelT")
Open = Callable[[grpc.ChannelCredentials], ChannelT]


class Link(Generic[ChannelT]):
    """One channel of gRPC, and the calls on it.

    Attributes:
        channel: The channel.
        calls: Number of calls in progress.
        retired: Whether another channel has replaced it, so that it is closed after the last call.
    """

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.calls = 0
        self.retired = False
        self._callables: dict[tuple[str, Any], Any] = {}

    def callable(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A method of the server on this channel, made when it is first called."""
        key = kind, arguments[0]
        if key not in self._callables:
            self._callables[key] = getattr(self.channel, kind)(*arguments, **options)
        return self._callables[key]


class Links(Generic[ChannelT]):
    """The current channel, and those that still have calls."""

    def __init__(
        self, files: TlsFiles, open_channel: Open[ChannelT], close: Callable[[ChannelT], Any]
    ) -> None:
        """Opens the first channel.

        Args:
            files: Certificates, which may be renewed.
            open_channel: Opens a channel with credentials.
            close: Closes one.

        Raises:
            InvalidArgumentError: The files cannot be used.
        """
        self._credentials = Credentials(files)
        self._open, self._close = open_channel, close
        self._lock = threading.Lock()
        self._current = Link(open_channel(self._credentials.current))
        self._retired: set[Link[ChannelT]] = set()
        self._is_closed = False

    @property
    def channel(self) -> ChannelT:
        """The channel of the next call."""
        return self._current.channel

    def acquire(self) -> Link[ChannelT]:
        """The channel for a call that begins. `release` follows when the call has ended."""
        idle = None
        with self._lock:
            if not self._is_closed and self._credentials.renewed():
                idle = self._retire(self._current)
                self._current = Link(self._open(self._credentials.current))
            link = self._current
            link.calls += 1
        if idle is not None:
            self._close(idle.channel)
        return link

    def release(self, link: Link[ChannelT]) -> None:
        """A call has ended. For any thread."""
        with self._lock:
            link.calls -= 1
            is_idle = link.retired and not link.calls
            if is_idle:
                self._retired.discard(link)
        if is_idle:
            self._close(link.channel)

    def close(self) -> list[ChannelT]:
        """Makes no more channels; returns those that are left, for the owner to close."""
        with self._lock:
            self._is_closed = True
            left, self._retired = [self._current, *self._retired], set()
            return [link.channel for link in left]

    def _retire(self, link: Link[ChannelT]) -> Link[ChannelT] | None:
        """Returns the link if it can be closed at once."""
        if not link.calls:
            return link
        link.retired = True
        self._retired.add(link)
        return None


class Method:
    """A method of the server whose reply the caller waits for, on the channel of the moment."""

    def __init__(
        self, links: Links[Any], kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._links = links
        self._method = kind, arguments, options

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls it, and waits."""
        link = self._links.acquire()
        try:
            return link.callable(*self._method)(*arguments, **options)
        finally:
            self._links.release(link)

    def with_call(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC's method of this name."""
        link = self._links.acquire()
        try:
            return link.callable(*self._method).with_call(*arguments, **options)
        finally:
            self._links.release(link)

    def future(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC's method of this name."""
        link = self._links.acquire()
        try:
            call = link.callable(*self._method).future(*arguments, **options)
        except BaseException:
            self._links.release(link)
            raise
        call.add_done_callback(lambda _: self._links.release(link))
        return call


class Stream(Method):
    """A method of the server that streams its replies, on the channel of the moment."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls it, and returns at once."""
        link = self._links.acquire()
        try:
            call = link.callable(*self._method)(*arguments, **options)
        except BaseException:
            self._links.release(link)
            raise
        if not call.add_callback(lambda: self._links.release(link)):  # it has ended
            self._links.release(link)
        return call


class RenewingChannel(grpc.Channel):
    """A channel of grpcio whose certificates are renewed."""

    def __init__(self, files: TlsFiles, open_channel: Open[grpc.Channel]) -> None:
        """Opens the first channel: see `Links`.

        Raises:
            InvalidArgumentError: The files cannot be used.
        """
        self._links: Links[grpc.Channel] = Links(files, open_channel, _close_soon)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of grpc.Channel."""
        return Method(self._links, "unary_unary", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of grpc.Channel."""
        return Method(self._links, "stream_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of grpc.Channel."""
        return Stream(self._links, "unary_stream", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of grpc.Channel."""
        return Stream(self._links, "stream_stream", arguments, options)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:  # noqa: FBT001, FBT002
        """As of grpc.Channel, of the channel of the moment."""
        self._links.channel.subscribe(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        """As of grpc.Channel, of the channel of the moment."""
        self._links.channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes every channel. Calls in progress are cancelled."""
        for channel in self._links.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close_soon(channel: grpc.Channel) -> None:
    """Closes a channel on another thread: the last call may have ended on the channel's own thread."""
    threading.Thread(target=channel.close, name="close", daemon=True).start()
