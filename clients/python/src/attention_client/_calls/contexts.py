"""Stored contexts: their rows or documents, and the calls that put, extend, restore and drop them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_client._calls.arrays import as_booleans
from attention_client._calls.sequences import (
    InputForm,
    encode_mask,
    fill_texts,
    fill_vectors,
    split_texts,
    texts,
    vectors,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, Arrays, RequestOptions, Texts, Wire
from attention_client.errors import LimitExceededError, NotFoundError, invalid

LOST = "CONTEXT_NOT_FOUND"
# How many times the rows are put before each repetition of a call. One is enough unless several servers stand
# behind one name: they are called in turn, so that n times in a row reach n of them.
_PUTS = (1, 2, 3)


class Rows(NamedTuple):
    """The rows of one sequence, which belong to the client: they may be sent again much later.

    Attributes:
        key: float32, (T, d).
        value: float32, (T, dv); None for models that do not separate it from the key.
        mask: (T,): False hides a row from every query.
    """

    key: Array
    value: Array | None
    mask: NDArray[np.bool_]


# Rows, or documents.
Part: TypeAlias = Rows | Sequence[str]


def read_parts(
    key: Arrays | None, value: Arrays | None, mask: Arrays | None, documents: Texts | None
) -> list[Part]:
    """Reads the rows of a context, or its documents in portions for one call each.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or there are both or none of them.
    """
    if documents is None and key is not None:
        return [read_rows(key, value, mask)]
    if documents is None or any(rows is not None for rows in (key, value, mask)):
        raise invalid("texts", "either documents or key rows", "neither" if documents is None else "both")
    _, strings = texts("texts", documents)
    return [strings[part] for part in split_texts(list(map(len, strings)))]


def read_rows(key: Arrays, value: Arrays | None, mask: Arrays | None) -> Rows:
    """Reads (T, d) of real numbers, and (T,) booleans.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape.
    """
    keys = _one_sequence("key", key)
    flags = np.ones(len(keys), bool) if mask is None else as_booleans("mask", mask).copy()
    if flags.shape != (len(keys),):
        raise invalid("mask", f"shape {(len(keys),)}, one for each row of the key", f"shape {flags.shape}")
    return Rows(keys, None if value is None else _one_sequence("value", value), flags)


def _one_sequence(field: str, value: Arrays) -> Array:
    sequences = vectors(field, value)
    if sequences.form is not InputForm.SINGLE:
        raise invalid(field, "one sequence, (T, d)", sequences.form.value)
    return sequences.pieces[0].copy()


def fill_parts(
    request: pb.PutContextRequest | pb.AppendContextRequest, parts: Sequence[Any], wire: Wire
) -> None:
    """Fills the message in place with all parts: with documents, or with rows as one sequence."""
    if not isinstance(parts[0], Rows):
        fill_texts("texts", request.text.texts, list(chain.from_iterable(parts)))
        return
    keys, values, masks = zip(*parts, strict=True)
    fill_vectors(request.key, vectors("key", np.concatenate(keys)), wire)
    if values[0] is not None:
        fill_vectors(request.value, vectors("value", np.concatenate(values)), wire)
    if not (mask := np.concatenate(masks)).all():
        request.mask.CopyFrom(encode_mask(mask, InputForm.SINGLE, ()))


class Context:
    """Key and value rows that a server has projected and stored, to which calls attend without sending them.

    Of a multi-vector encoder, documents, with which `rerank` compares queries: what follows holds for them.

    The server removes a context that expires or whose memory it needs, and neither a restarted server nor
    another replica has it. A call that finds so puts the rows again by itself and is repeated, once, or until
    each of several servers has them. The calls of contexts that `contexts` lists, whose rows are not here,
    fail with NotFoundError and the reason CONTEXT_NOT_FOUND.

    As a context manager, it is dropped at the end of the block. With an AsyncAttentionClient, `append` and
    `drop` are awaited, and the block begins with `async with await client.context(...)`.

    Attributes:
        id: The same on every server for the same model, rows, mask and order of appends.
        model_name: Name of the model.
        model_version: Version of the model.
        rows: Number of rows that may be attended to, without those that a mask hides; of documents, of their
            token vectors.
        documents: Number of documents; 0 for rows.
        bytes: Memory that it takes on the server.
        expires_at: When the server removes it, in UTC.
        shared: Whether callers with other identities may use it.
    """

    def __init__(
        self,
        connection: Any,
        options: RequestOptions,
        rows: Sequence[Part] = (),
        *,
        truncate: bool | None = None,
        ttl: int = 0,
        shared: bool = False,
        stored: pb.Context | None = None,
    ) -> None:
        self._connection = connection
        self._options = options  # with the version as the caller gave it
        self._rows = list(rows)  # none of a listed context
        self._truncate = truncate
        self._ttl = ttl
        self._shared = shared
        self._lock = connection._new_lock()
        self._puts = 0  # how often the rows were put
        if stored is not None:
            self._update(stored)

    def _update(self, stored: pb.Context) -> None:
        self.id = stored.id
        self.model_name = stored.model_name
        self.model_version = stored.model_version
        self.rows = stored.rows
        self.documents = stored.documents
        self.bytes = stored.bytes
        self.expires_at = datetime.fromtimestamp(stored.expires_at, UTC)
        self.shared = stored.shared

    def append(
        self,
        key: Arrays | None = None,
        value: Arrays | None = None,
        *,
        texts: Texts | None = None,
        mask: Arrays | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Appends rows or documents: this object then stands for the longer context, which has another id.

        Args:
            key: Further key rows, (T, d).
            value: Further value rows, for models that separate them from the key.
            texts: Further documents, in place of rows; they are cut as those of `AttentionClient.context`.
            mask: Booleans (T,): False hides a row from every query.
            timeout: Seconds; None means the client's timeout.

        Raises:
            AttentionClientError: The call failed, and this object is unchanged; or it has some of the
                documents, if they were sent in several requests.
        """
        return self._connection._run(self._append(read_parts(key, value, mask, texts), timeout))

    def drop(self, *, timeout: float | None = None) -> Any:
        """Removes the context from the server, unless it is gone already. It is not put again."""
        return self._connection._run(self._drop(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()

    async def _put(self, timeout: float | None, *further: Part) -> None:
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
        self._puts += 1
        self._update(stored)

    async def _recover(self, call: Any, error: NotFoundError, timeout: float | None) -> Any:
        """Puts the rows again, unless another call has done so since, and repeats the call.

        Args:
            call: An EncodedCall, whose module imports this one.
            error: Why it failed.
            timeout: Seconds of each call.

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
                if self._puts == puts:
                    for _ in range(times):
                        await self._put(timeout)
                puts = self._puts
            request.context_id = self.id
            try:
                return await self._connection._attend(replace(call, context=None), timeout)
            except NotFoundError as again:
                error = again
        raise error

    async def _append(self, parts: Sequence[Part], timeout: float | None) -> None:
        async with self._lock:
            for part in parts:
                try:
                    self._update(await self._ask("AppendContext", [part], timeout, id=self.id))
                except NotFoundError as error:
                    if error.reason != LOST or not self._rows:
                        raise
                    await self._put(timeout, part)
                if self._rows:
                    self._rows.append(part)

    async def _drop(self, timeout: float | None) -> None:
        async with self._lock:
            self._rows.clear()
        try:
            await self._ask("DropContext", (), timeout, id=self.id)
        except NotFoundError as error:
            if error.reason != LOST:
                raise

    async def _ask(self, method: str, parts: Sequence[Part], timeout: float | None, **fields: Any) -> Any:
        """The context of the response, if the method's has one."""
        model = {"model_name": self._options.model, "model_version": self._options.version}
        request = getattr(pb, f"{method}Request")(**model, **fields)
        if parts:
            request.ttl_seconds = self._ttl
            fill_parts(request, parts, self._options.wire)
            if self._truncate is not None:
                request.text.truncate = self._truncate
        return await self._connection._ask(
            method, request, lambda response: getattr(response, "context", None), timeout
        )
