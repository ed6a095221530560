"""The asynchronous client on grpc.aio: changes with the list of calls, as the synchronous one does."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike

from attention_client._connection_async import AsyncConnection
from attention_client._decoding import decode_result
from attention_client._encoding import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._models import ModelInfo
from attention_client._stream_async import StreamCall, as_async, attend_stream
from attention_client._streaming import plan_stream
from attention_client._values import (
    Array,
    Arrays,
    Ask,
    AttendInputs,
    AttendOptions,
    AttentionResult,
    CallOptions,
    FloatArray,
    PaddedOptions,
    Result,
    StreamItem,
    StreamOptions,
    Texts,
)
from attention_client.errors import AttentionClientError


class AsyncAttentionClient(AsyncConnection):
    """AttentionClient for asyncio: the same calls, to be awaited, with the same arguments and errors.

    Made inside a running event loop, and used on that loop only.
    """

    @overload
    async def attend(
        self,
        model: str,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend(
        self,
        model: str,
        query: Sequence[ArrayLike],
        key: Sequence[ArrayLike] | None = None,
        value: Sequence[ArrayLike] | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[list[FloatArray]]: ...
    async def attend(
        self,
        model: str,
        query: Arrays,
        key: Arrays | None = None,
        value: Arrays | None = None,
        *,
        mask: Arrays | None = None,
        lengths: ArrayLike | None = None,
        positions: Arrays | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend`."""
        ask = Ask(model=model, version=version, return_weights=return_weights)
        call = encode_vectors(ask, AttendInputs(query, key, value, mask, lengths, positions))
        return await self._attend(call, timeout)

    @overload
    async def attend_text(
        self, model: str, text: str, **options: Unpack[CallOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend_text(
        self, model: str, text: Texts, **options: Unpack[CallOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    async def attend_text(
        self,
        model: str,
        text: str | Texts,
        *,
        mask: Arrays | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend_text`."""
        ask = Ask(model=model, version=version, return_weights=return_weights)
        return await self._attend(encode_texts(ask, text, mask=mask), timeout)

    @overload
    async def attend_tokens(
        self, model: str, token_ids: Array, **options: Unpack[PaddedOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend_tokens(
        self, model: str, token_ids: Sequence[ArrayLike], **options: Unpack[PaddedOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    async def attend_tokens(
        self,
        model: str,
        token_ids: Arrays,
        *,
        mask: Arrays | None = None,
        lengths: ArrayLike | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend_tokens`."""
        ask = Ask(model=model, version=version, return_weights=return_weights)
        return await self._attend(encode_tokens(ask, token_ids, mask=mask, lengths=lengths), timeout)

    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[Result, None]: ...
    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: bool,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[Result | AttentionClientError, None]: ...
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: bool = False,
        return_weights: bool = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        version: str = "",
    ) -> AsyncGenerator[Any, None]:
        """As `AttentionClient.attend_stream`, over an iterable or an asynchronous one.

        A plain iterable is read on the event loop, and must not block. Closing the generator (`aclose`, or
        contextlib.aclosing around it) cancels the call; merely leaving the loop does so some time later.
        """
        plan = plan_stream(
            Ask(model=model, version=version, return_weights=return_weights),
            return_exceptions=return_exceptions,
            max_in_flight=max_in_flight,
            timeout=timeout,
            default=self._timeout,
        )
        return attend_stream(self._open_stream, as_async(requests), plan)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """As `AttentionClient.models`."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [ModelInfo.from_proto(model) for model in response.models]

    async def model(self, name: str, version: str = "", *, timeout: float | None = None) -> ModelInfo:
        """As `AttentionClient.model`."""
        request = pb.GetModelRequest(name=name, version=version)
        response = await self._call(self._stub.GetModel, request, timeout)
        return ModelInfo.from_proto(response.model)

    async def _attend(self, call: EncodedCall, timeout: float | None) -> AttentionResult[Any]:
        return decode_result(await self._call(self._stub.Attend, call.request, timeout), call.layout)

    def _open_stream(self, timeout: float | None) -> StreamCall:
        return self._stub.AttendStream(timeout=timeout)
