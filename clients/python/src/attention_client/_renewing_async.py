"""As `_renewing`, for grpc.aio."""

import asyncio
from typing import Any, Self

import grpc
from grpc import aio

from attention_client._renewing import ChannelMethod, Links, Open
from attention_client._tls import TlsFiles


class _Method(ChannelMethod):
    """A method of the server."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls it, and returns the call."""
        call, release = self._begin(lambda method: method(*arguments, **options))
        call.add_done_callback(lambda _: release())
        return call


class AsyncRenewingChannel(aio.Channel):
    """A channel of grpc.aio whose certificates are renewed. Belongs to one event loop."""

    def __init__(self, files: TlsFiles, open_channel: Open[aio.Channel]) -> None:
        """Opens the first channel: see `Links`.

        Raises:
            InvalidArgumentError: The files cannot be used.
        """
        self._links: Links[aio.Channel] = Links(files, open_channel, self._close_soon)
        self._closing: set[asyncio.Task[None]] = set()

    def _close_soon(self, channel: aio.Channel) -> None:
        """Closes a channel that has no calls."""
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of aio.Channel."""
        return _Method(self._links, "unary_unary", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of aio.Channel."""
        return _Method(self._links, "stream_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of aio.Channel."""
        return _Method(self._links, "unary_stream", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As of aio.Channel."""
        return _Method(self._links, "stream_stream", arguments, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """As of aio.Channel, of the channel of the moment."""
        return self._links.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of aio.Channel, of the channel of the moment."""
        await self._links.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of aio.Channel, of the channel of the moment."""
        await self._links.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Closes every channel. Calls in progress are cancelled after the grace."""
        await asyncio.gather(*(channel.close(grace) for channel in self._links.close()), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
