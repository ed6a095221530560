"""A bidirectional stream on tasks: changes with how the asynchronous client uses grpc.aio.

One task reads the caller's iterable and sends; the caller's task receives. Entries (see streaming.py)
pass from the first to the second, and the slots of `max_in_flight` back.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import grpc
from grpc import aio

from attention_client._call_status import CallEnd
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
from attention_client.errors import AttentionClientError, CallCancelledError, translated

StreamCall: TypeAlias = aio.StreamStreamCall[pb.AttendStreamRequest, pb.AttendStreamResponse]
OpenCall: TypeAlias = Callable[[float | None], StreamCall]


async def attend_stream(
    open_call: OpenCall, items: AsyncIterator[StreamItem], plan: StreamPlan
) -> AsyncGenerator[Outcome, None]:
    """Runs one stream; closing the generator cancels the call and stops the reading."""
    call = open_call(plan.timeout)
    sender, end = _Sender(call, items, plan), CallEnd(call)
    call.add_done_callback(lambda _: sender.entries.put_nowait(Mark.CALL_ENDED))
    task = asyncio.create_task(sender.run())
    try:
        while (entry := await sender.entries.get()) is not Mark.INPUT_ENDED:
            outcome = await _outcome(entry, sender, end, plan)
            sender.slots.release()
            if isinstance(outcome, AttentionClientError) and not plan.return_exceptions:
                raise outcome
            yield outcome
        await _finish(call, plan.idle_timeout)
        if sender.failure is not None:
            raise sender.failure
    finally:
        call.cancel()
        task.cancel()
        await asyncio.wait([task])


async def as_async(items: Iterable[StreamItem] | AsyncIterable[StreamItem]) -> AsyncIterator[StreamItem]:
    """One kind of iterable for both."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


@contextmanager
def translated_async() -> Iterator[None]:
    """As `translated`; also tells a call that was cancelled from a task that was.

    grpc.aio raises asyncio.CancelledError for both; let through for the first, it would look to the
    caller as if its own task had been cancelled.
    """
    try:
        with translated():
            yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallCancelledError("the call was cancelled by the server, or the client was closed") from None


async def _outcome(entry: Entry, sender: "_Sender", end: CallEnd, plan: StreamPlan) -> Outcome:
    if isinstance(entry, AttentionClientError):
        return entry
    try:
        return await _receive(entry, sender.call, plan.idle_timeout)
    except AttentionClientError as error:
        broken = await end.true_error(error)
    # What the caller's own iterable raised comes first: it says more than a call that broke as well.
    raise sender.failure or broken


async def _receive(entry: Sent | Mark, call: StreamCall, limit: float | None) -> Outcome:
    """Waits for one answer. After the call's end there is none, and grpc says why."""
    answer = await _read(call, limit)
    if not isinstance(answer, pb.AttendStreamResponse) or isinstance(entry, Mark):
        raise ended_early()
    return decode_answer(answer, entry)


async def _read(call: StreamCall, limit: float | None) -> object:
    """The next answer, or grpc's mark for the end of them."""
    try:
        async with asyncio.timeout(limit) as clock:
            with translated_async():
                return await call.read()
    except TimeoutError:
        if clock.expired():
            raise idle_too_long(limit) from None
        raise


async def _finish(call: StreamCall, limit: float | None) -> None:
    """Lets the server end the call. All answers are here: what goes wrong now changes none of them."""
    with suppress(AttentionClientError):
        await _read(call, limit)


class _Sender:
    """Reads the caller's items as slots get free, and sends their requests.

    Attributes:
        call: The call that carries them.
        entries: What became of each item, in order.
        failure: What the caller's iterable raised.
        slots: Released by the receiver, once for each answer.
    """

    def __init__(self, call: StreamCall, items: AsyncIterator[StreamItem], plan: StreamPlan) -> None:
        self.entries: asyncio.Queue[Entry] = asyncio.Queue()
        self.failure: Exception | None = None
        self.slots = asyncio.Semaphore(plan.max_in_flight)
        self.call, self._items, self._ask = call, items, plan.ask
        self._index = 0

    async def run(self) -> None:
        """Sends until the items end or the call does; the receiver learns of the call's end from the call."""
        try:
            while (request := await self._next_request()) is not None:
                await self.call.write(request)
            await self.call.done_writing()
        except (grpc.RpcError, aio.BaseError, asyncio.InvalidStateError):
            pass
        finally:
            self.entries.put_nowait(Mark.INPUT_ENDED)

    async def _next_request(self) -> pb.AttendStreamRequest | None:
        while True:
            await self.slots.acquire()
            try:
                item = await anext(self._items)
                entry, request = encode_item(self._index, item, self._ask)
            except StopAsyncIteration:
                return None
            except Exception as error:  # raised again, in the caller's task
                self.failure = error
                return None
            self._index += 1
            self.entries.put_nowait(entry)
            if request is not None:
                return request
