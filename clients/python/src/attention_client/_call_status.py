"""How an asynchronous call really ended: changes with what grpc.aio makes of a status.

A write that meets the end of its call makes grpc.aio replace the call's status by one of its own, INTERNAL
"Internal error from Core"; before the true status is known or after. What the server said is lost, unless
it is noted at the moment that it comes.
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
# The true status is on its way when the placeholder is met; this is for one that never comes.
_LONGEST_WAIT = 1.0
_ValueT = TypeVar("_ValueT")


class CallEnd:
    """Notes the status of one call when it comes."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def true_error(self, error: AttentionClientError) -> AttentionClientError:
        """The error that the call ended with, for one that may be the placeholder."""
        if error.message != _PLACEHOLDER:
            return error
        with suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), _LONGEST_WAIT)
        if self._status is None or self._status.code() is grpc.StatusCode.OK:
            return ended_early()
        return from_rpc_error(self._status)

    def _note(self, call: aio.Call) -> None:
        """Called at every change of status; what it reads is there, so that nothing is waited for."""
        code, details = _ready(call.code()), _ready(call.details())
        if code is None or details == _PLACEHOLDER:
            return
        metadata = _ready(call.trailing_metadata())
        self._status = aio.AioRpcError(code, trailing_metadata=metadata, details=details)
        self._known.set()


def _ready(value: Coroutine[Any, Any, _ValueT]) -> _ValueT | None:
    """The value of a coroutine that has nothing to wait for."""
    try:
        value.send(None)
    except StopIteration as stop:
        result: _ValueT = stop.value
        return result
    value.close()
    return None
