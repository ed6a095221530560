"""The asynchronous client, on grpc.aio."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike

from attention_client._connection_async import AsyncConnection
from attention_client._decoding import decode_result
from attention_client._embeddings import EmbedInputs, EmbedOptions, decode_embeddings, encode_embeddings
from attention_client._encoding import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._models import ModelInfo
from attention_client._named import decode_infer, encode_infer
from attention_client._stream_async import StreamCall, async_iterator_of, attend_stream
from attention_client._streaming import stream_settings
from attention_client._text_spans import SpanList, SpanLists
from attention_client._values import (
    AnyResult,
    Array,
    Arrays,
    AttendInputs,
    AttendOptions,
    AttentionResult,
    EmbedCallOptions,
    FloatArray,
    InferResult,
    PaddedOptions,
    RequestOptions,
    ReturnWeights,
    StreamItem,
    StreamOptions,
    TextLists,
    TextOptions,
    Texts,
    TokenLists,
    VectorLists,
    Version,
    request_options,
)
from attention_client.errors import AttentionClientError


class AsyncAttentionClient(AsyncConnection):
    """AttentionClient for asyncio: the same arguments, the same errors, and the same calls, to be awaited.

    Create it inside a running event loop, and use it on that loop only.
    """

    @overload
    async def attend(
        self,
        model: str,
        query: Array,
        key: Arrays | None = None,
        value: Arrays | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend(
        self,
        model: str,
        query: VectorLists,
        key: Arrays | None = None,
        value: Arrays | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[list[FloatArray]]: ...
    @overload
    async def attend(
        self,
        model: str,
        query: Arrays,
        key: Arrays | None = None,
        value: Arrays | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[Any]: ...
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
        return_weights: ReturnWeights = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend`."""
        options = self._options(model, version, return_weights=return_weights)
        call = encode_vectors(options, AttendInputs(query, key, value, mask, lengths, positions))
        return await self._attend(call, timeout)

    @overload
    async def attend_text(
        self, model: str, text: str, **options: Unpack[TextOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend_text(
        self, model: str, text: Texts, **options: Unpack[TextOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    async def attend_text(
        self,
        model: str,
        text: str | Texts,
        *,
        mask: Arrays | None = None,
        return_weights: ReturnWeights = False,
        return_offsets: bool = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend_text`."""
        options = self._options(model, version, return_weights=return_weights)
        call = encode_texts(options, text, mask=mask, return_offsets=return_offsets)
        return await self._attend(call, timeout)

    @overload
    async def attend_tokens(
        self, model: str, token_ids: Array, **options: Unpack[PaddedOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    async def attend_tokens(
        self, model: str, token_ids: TokenLists, **options: Unpack[PaddedOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    @overload
    async def attend_tokens(
        self, model: str, token_ids: Arrays, **options: Unpack[PaddedOptions]
    ) -> AttentionResult[Any]: ...
    async def attend_tokens(
        self,
        model: str,
        token_ids: Arrays,
        *,
        mask: Arrays | None = None,
        lengths: ArrayLike | None = None,
        return_weights: ReturnWeights = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> AttentionResult[Any]:
        """As `AttentionClient.attend_tokens`."""
        options = self._options(model, version, return_weights=return_weights)
        return await self._attend(encode_tokens(options, token_ids, mask=mask, lengths=lengths), timeout)

    @overload
    async def embed(
        self, model: str, inputs: EmbedInputs, *, spans: None = None, **options: Unpack[EmbedCallOptions]
    ) -> FloatArray: ...
    @overload
    async def embed(
        self, model: str, inputs: str, *, spans: SpanList, **options: Unpack[EmbedCallOptions]
    ) -> FloatArray: ...
    @overload
    async def embed(
        self, model: str, inputs: TextLists, *, spans: SpanLists, **options: Unpack[EmbedCallOptions]
    ) -> list[FloatArray]: ...
    @overload
    async def embed(
        self,
        model: str,
        inputs: EmbedInputs,
        *,
        spans: SpanList | SpanLists | None,
        **options: Unpack[EmbedCallOptions],
    ) -> Any: ...
    async def embed(
        self,
        model: str,
        inputs: EmbedInputs,
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool | None = None,
        spans: SpanList | SpanLists | None = None,
        timeout: float | None = None,
        version: Version = "",
    ) -> Any:
        """As `AttentionClient.embed`."""
        options = self._options(model, version, return_weights=False)
        asked = EmbedOptions(prompt=prompt, dimensions=dimensions, truncate=truncate, spans=spans)
        call = encode_embeddings(options, inputs, asked)
        responses = [await self._call(self._stub.Attend, request, timeout) for request in call.requests]
        return decode_embeddings(responses, call)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Arrays],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: Version = "",
    ) -> InferResult:
        """As `AttentionClient.infer`."""
        options = self._options(model, version, return_weights=False)
        call = encode_infer(options, inputs, outputs)
        return decode_infer(await self._call(self._stub.Attend, call.request, timeout), call)

    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[AnyResult, None]: ...
    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: bool,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[AnyResult | AttentionClientError, None]: ...
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: bool = False,
        return_weights: ReturnWeights = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        version: Version = "",
    ) -> AsyncGenerator[Any, None]:
        """As `AttentionClient.attend_stream`, over an iterable or an asynchronous iterable.

        An iterable is read on the event loop and must not block. Closing the generator (`aclose`, or
        contextlib.aclosing around it) cancels the call; leaving the loop cancels it some time later.
        """
        settings = stream_settings(
            self._options(model, version, return_weights=return_weights),
            return_exceptions=return_exceptions,
            max_in_flight=max_in_flight,
            timeout=timeout,
            default=self._settings.timeout,
        )
        outcomes = attend_stream(self._open_stream, async_iterator_of(requests), settings)
        return self._outcomes(outcomes, settings.timeout)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """As `AttentionClient.models`."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [ModelInfo.from_proto(model) for model in response.models]

    async def model(self, name: str, version: Version = "", *, timeout: float | None = None) -> ModelInfo:
        """As `AttentionClient.model`."""
        options = request_options(name, version, return_weights=False)
        request = pb.GetModelRequest(name=options.model, version=options.version)
        response = await self._call(self._stub.GetModel, request, timeout)
        return ModelInfo.from_proto(response.model)

    def _options(self, model: str, version: Version, *, return_weights: ReturnWeights) -> RequestOptions:
        wire = self._settings.wire
        return request_options(model, version, return_weights=return_weights, wire=wire)

    async def _attend(self, call: EncodedCall, timeout: float | None) -> AttentionResult[Any]:
        return decode_result(await self._call(self._stub.Attend, call.request, timeout), call.response_shape)

    def _open_stream(self, timeout: float | None) -> StreamCall:
        return self._open(self._stub.AttendStream, timeout)
