"""Channels that are replaced when certificates are renewed, without an effect on the calls in progress."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


class ChannelMethod:
    """A method of the server, on the channel of the moment."""

    def __init__(
        self, links: Links[Any], kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._links = links
        self._method = kind, arguments, options

    def _begin(self, begin: Callable[[Any], Any]) -> tuple[Any, Callable[[], None]]:
        """Begins a call on the current channel; returns it, and what to do when it has ended."""
        link = self._links.acquire()
        release = partial(self._links.release, link)
        try:
            return begin(link.callable(*self._method)), release
        except BaseException:
            release()
            raise


class Method(ChannelMethod):
    """A method of the server whose reply the caller waits for."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls it, and waits."""
        with self._waiting() as method:
            return method(*arguments, **options)

    def with_call(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC's method of this name."""
        with self._waiting() as method:
            return method.with_call(*arguments, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC's method of this name."""
        call, release = self._begin(lambda method: method.future(*arguments, **options))
        call.add_done_callback(lambda _: release())
        return call

    @contextmanager
    def _waiting(self) -> Iterator[Any]:
        """The method of the current channel, for a call that ends with the block."""
        link = self._links.acquire()
        try:
            yield link.callable(*self._method)
        finally:
            self._links.release(link)


class Stream(ChannelMethod):
    """A method of the server that streams its replies."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls it, and returns at once."""
        call, release = self._begin(lambda method: method(*arguments, **options))
        if not call.add_callback(release):  # it has ended
            release()
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
