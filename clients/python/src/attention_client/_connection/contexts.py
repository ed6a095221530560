"""What a stored context is put from, and the calls that concern it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attention_client._calls.attention import EncodedCall
from attention_client._calls.contexts import Rows, fill_rows, read_rows
from attention_client._connection.base import BaseConnection
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Arrays, Context, RequestOptions
from attention_client.errors import LimitExceededError, NotFoundError

_ResultT = TypeVar("_ResultT")
LOST = "CONTEXT_NOT_FOUND"
# How many times the rows are put before each repetition of a call. One is enough unless several servers stand
# behind one name: they are called in turn, so that n times in a row reach n of them.
_PUTS = (1, 2, 3)


class ContextSource:
    """The rows of one context and how they are put.

    Attributes:
        options: The model, its version as the caller gave it, and the type in which rows are sent.
        puts: How often the rows were put.
        run: Runs the steps of a call.
    """

    def __init__(
        self,
        connection: BaseConnection,
        options: RequestOptions,
        rows: Sequence[Rows] = (),
        *,
        ttl: int = 0,
        shared: bool = False,
    ) -> None:
        self.options = options
        self.puts = 0
        self.run = connection._run
        self._connection = connection
        self._rows = list(rows)
        self._ttl = ttl
        self._shared = shared
        self._lock = connection._new_lock()

    async def put(self, timeout: float | None, *further: Rows) -> pb.Context:
        """Puts all rows, and further ones: as one sequence or, if that is too long, as they were appended."""
        first, *appended = parts = [*self._rows, *further]
        try:
            stored: pb.Context = await self._ask("PutContext", parts, timeout, shared=self._shared)
        except LimitExceededError:
            if not appended:
                raise
            stored = await self._ask("PutContext", [first], timeout, shared=self._shared)
            for part in appended:
                stored = await self._ask("AppendContext", [part], timeout, id=stored.id)
        self.puts += 1
        return stored

    async def recover(
        self, context: Context, call: EncodedCall[_ResultT], error: NotFoundError, timeout: float | None
    ) -> _ResultT:
        """Puts the rows again, unless another call has done so since, and repeats the call.

        Raises:
            AttentionClientError: There are no rows to put, or the context is not found in spite of it.
        """
        (request,) = call.requests
        puts = call.puts
        for times in _PUTS:
            if error.reason != LOST:
                break
            async with self._lock:
                if not self._rows:
                    break
                if self.puts == puts:
                    for _ in range(times):
                        context._update(await self.put(timeout))
                puts = self.puts
            request.context_id = context.id
            try:
                return await self._connection._attend(replace(call, context=None), timeout)
            except NotFoundError as again:
                error = again
        raise error

    async def append(
        self, context: Context, key: Arrays, value: Arrays | None, mask: Arrays | None, timeout: float | None
    ) -> None:
        """See Context."""
        rows = read_rows(key, value, mask)
        async with self._lock:
            try:
                stored = await self._ask("AppendContext", [rows], timeout, id=context.id)
            except NotFoundError as error:
                if error.reason != LOST or not self._rows:
                    raise
                stored = await self.put(timeout, rows)
            if self._rows:  # a listed context has none
                self._rows.append(rows)
            context._update(stored)

    async def drop(self, context: Context, timeout: float | None) -> None:
        """See Context."""
        async with self._lock:
            self._rows.clear()
        try:
            await self._ask("DropContext", (), timeout, id=context.id)
        except NotFoundError as error:
            if error.reason != LOST:
                raise

    async def _ask(self, method: str, parts: Sequence[Rows], timeout: float | None, **fields: Any) -> Any:
        """The context of the response, if the method's has one."""
        model = {"model_name": self.options.model, "model_version": self.options.version}
        request = getattr(pb, f"{method}Request")(**model, **fields)
        if parts:
            request.ttl_seconds = self._ttl
            fill_rows(request, parts, self.options.wire)
        return await self._connection._ask(
            method, request, lambda response: getattr(response, "context", None), timeout
        )
