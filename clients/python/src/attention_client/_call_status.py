"""Recovers the status of an asynchronous call.

If a write meets the end of its call, grpc.aio replaces the call's status by INTERNAL "Internal error from
Core", before or after the server's status is known. The server's status is lost unless it is recorded when it
arrives.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from grpc import aio

from attention_client._streaming import ended_early
from attention_client.errors import AttentionClientError, from_rpc_error

_PLACEHOLDER = "Internal error from Core"
# Seconds. The server's status usually follows the placeholder at once; this bounds the wait for it.
_LONGEST_WAIT = 1.0
_ValueT = TypeVar("_ValueT")


class CallStatus:
    """Records the status of one call when it arrives."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def true_error(self, error: AttentionClientError) -> AttentionClientError:
        """The error of the server's status if the given one is the placeholder."""
        if error.message != _PLACEHOLDER:
            return error
        with suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), _LONGEST_WAIT)
        if self._status is None or self._status.code() is grpc.StatusCode.OK:
            return ended_early()
        return from_rpc_error(self._status)

    def _note(self, call: aio.Call) -> None:
        """Called at every change of status; the values that it reads are available without waiting."""
        code, details = ready(call.code()), ready(call.details())
        if code is None or details == _PLACEHOLDER:
            return
        metadata = ready(call.trailing_metadata())
        self._status = aio.AioRpcError(code, trailing_metadata=metadata, details=details)
        self._known.set()


def ready(value: Coroutine[Any, Any, _ValueT]) -> _ValueT | None:
    """The value of a coroutine that does not wait; None if it would."""
    try:
        value.send(None)
    except StopIteration as stop:
        result: _ValueT = stop.value
        return result
    value.close()
    return None
