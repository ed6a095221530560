"""Replies that depend on results of the engine, and the one way to wait for them."""

import math
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message

from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.rpc.transport.seam import Call, Callback


class DeferredReply(NamedTuple):
    """A reply that is sent once its result is available.

    Attributes:
        future: Resolves with a result, such as the engine's, or an `EngineError`; cancelled if the call ends
            first.
        encode: Makes the reply of the resolved future; raises what `Future.result` raises.
        deadline: When the caller stops waiting for this reply, on `time.monotonic`'s clock. The call's own
            deadline applies as well.
    """

    future: Future[Any]
    encode: "Callable[[Future[Any]], Message | bytes]"
    deadline: float = math.inf


# What a handler answers with: a message, its serialized form, or either of them later.
Reply: TypeAlias = Message | bytes | DeferredReply


def wait(call: Call, reply: DeferredReply, then: Callable[[Future[Any]], None]) -> None:
    """Calls back on the transport's thread with the resolved future of a reply.

    The future fails with DeadlineExceededError at the reply's deadline. If the call ends first, the future
    is cancelled, so that the engine does not compute a result that cannot be sent, and there is no callback.
    """
    future = reply.future
    cancel_timer = None
    if reply.deadline < call.deadline:
        cancel_timer = call.call_at(reply.deadline, partial(_expire, future))
        call.add_done_callback(cancel_timer)
    call.add_done_callback(future.cancel)
    # A future keeps its callbacks. None of them may hold the future, or the cycle of references would keep
    # the request in memory until the garbage collector runs.
    future.add_done_callback(partial(_resolved, call, then, cancel_timer))


def _expire(future: Future[Any]) -> None:
    with suppress(InvalidStateError):  # resolved at this moment
        future.set_exception(DeadlineExceededError("the deadline passed before the result was computed"))


def _resolved(
    call: Call,
    then: Callable[[Future[Any]], None],
    cancel_timer: Callback | None,
    future: Future[Any],
) -> None:
    """Runs on the thread that resolved the future."""
    call.call_soon_threadsafe(partial(_complete, call, then, cancel_timer, future))


def _complete(
    call: Call,
    then: Callable[[Future[Any]], None],
    cancel_timer: Callback | None,
    future: Future[Any],
) -> None:
    if call.ended_with is not None:
        return
    call.remove_done_callback(future.cancel)
    if cancel_timer is not None:
        call.remove_done_callback(cancel_timer)
        cancel_timer()
    then(future)
