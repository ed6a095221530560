"""The synchronous client: changes with the list of calls.

Notation: B sequences, T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from numpy.typing import ArrayLike

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    channel_options,
    seconds,
)
from attention_client.decoding import decode_result
from attention_client.encoding import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client.errors import AttentionClientError, translated
from attention_client.models import ModelInfo
from attention_client.readiness import Readiness, wait_until_ready
from attention_client.stream_sync import StreamCall, attend_stream
from attention_client.streaming import plan_stream
from attention_client.values import (
    Array,
    Arrays,
    Ask,
    AttendInputs,
    AttentionResult,
    CallOptions,
    FloatArray,
    PaddedOptions,
    Result,
    StreamItem,
    StreamOptions,
    Texts,
)

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class AttentionClient:
    """Asks an attention server for context vectors. Safe to share between threads.

    Every call raises AttentionClientError where there is no result; `errors` draws its subclasses.

    Args:
        target: The server, as HOST:PORT.
        timeout: Seconds that a call may take where the call itself says nothing.
        max_message_bytes: Largest request and largest answer.
        credentials: TLS and the like; None for a plain connection.

    Raises:
        InvalidArgumentError: The timeout or the limit is not positive.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target, self._timeout = target, seconds(timeout)
        options = channel_options(max_message_bytes)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._stub = AttentionServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls under way raise CallCancelledError."""
        self._channel.close()

    @overload
    def attend(
        self,
        model: str,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        **options: Unpack[PaddedOptions],
    ) -> AttentionResult[FloatArray]: ...
    @overload
    def attend(
        self,
        model: str,
        query: Sequence[ArrayLike],
        key: Sequence[ArrayLike] | None = None,
        value: Sequence[ArrayLike] | None = None,
        **options: Unpack[PaddedOptions],
    ) -> AttentionResult[list[FloatArray]]: ...
    def attend(
        self,
        model: str,
        query: Arrays,
        key: Arrays | None = None,
        value: Arrays | None = None,
        *,
        mask: Arrays | None = None,
        lengths: ArrayLike | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """Computes context vectors and answers in the kind of the query.

        Args:
            model: Name of the model.
            query: One sequence (Tq, d), a batch (B, Tq, d), or a list or tuple of (Tq_i, d); real numbers of
                any type, sent as float32.
            key: For cross-attention; of the same kind, and as many sequences.
            value: For models that separate it from the key; as many rows as the key.
            mask: Booleans, True = may attend. (Tk,), (Tq, Tk) or (H, Tq, Tk) for one sequence; the same
                with B before it for a batch; a list of them, all of one rank, for a list.
            lengths: Integers (B,), for a batch only: how many rows of each key sequence are valid; in
                self-attention, of each sequence. The others are not sent, and their results are zeros.
            return_weights: Whether to return the attention weights too.
            timeout: Seconds; None for the client's.
            version: Version of the model; empty for its highest.

        Raises:
            InvalidArgumentError: An argument has a wrong type or shape, or the server refuses it.
            AttentionClientError: There is no result for another reason.
        """
        ask = Ask(model=model, version=version, return_weights=return_weights)
        return self._attend(encode_vectors(ask, AttendInputs(query, key, value, mask, lengths)), timeout)

    @overload
    def attend_text(
        self, model: str, text: str, **options: Unpack[CallOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    def attend_text(
        self, model: str, text: Texts, **options: Unpack[CallOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    def attend_text(
        self,
        model: str,
        text: str | Texts,
        *,
        mask: Arrays | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """Self-attention over the tokens of one text, or of each text of a list; otherwise as `attend`."""
        ask = Ask(model=model, version=version, return_weights=return_weights)
        return self._attend(encode_texts(ask, text, mask=mask), timeout)

    @overload
    def attend_tokens(
        self, model: str, token_ids: Array, **options: Unpack[PaddedOptions]
    ) -> AttentionResult[FloatArray]: ...
    @overload
    def attend_tokens(
        self, model: str, token_ids: Sequence[ArrayLike], **options: Unpack[PaddedOptions]
    ) -> AttentionResult[list[FloatArray]]: ...
    def attend_tokens(
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
        """Self-attention over token ids: integers (T,), (B, T) or a list of (T_i,); otherwise as `attend`."""
        ask = Ask(model=model, version=version, return_weights=return_weights)
        return self._attend(encode_tokens(ask, token_ids, mask=mask, lengths=lengths), timeout)

    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem],
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[StreamOptions],
    ) -> Generator[Result, None, None]: ...
    @overload
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem],
        *,
        return_exceptions: bool,
        **options: Unpack[StreamOptions],
    ) -> Generator[Result | AttentionClientError, None, None]: ...
    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem],
        *,
        return_exceptions: bool = False,
        return_weights: bool = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        version: str = "",
    ) -> Generator[Any, None, None]:
        """Computes context vectors for many requests on one connection; yields results in their order.

        The requests are read from another thread, as answers come: never more than `max_in_flight` ahead of
        the answers, so that they may be endless. An exception that they raise is raised here, after the
        results of the requests before it. Closing the generator cancels the call.

        Args:
            model: Name of the model.
            requests: Each a query as of `attend`, or AttendInputs for more than a query.
            return_exceptions: Whether to yield the error of a refused request in its place and go on,
                rather than raise it.
            return_weights: Whether to return the attention weights too.
            max_in_flight: Most requests read and not yet answered.
            timeout: Seconds for the whole stream; None for no such limit, and then the client's timeout
                bounds the wait for each answer instead.
            version: Version of the model; empty for its highest.

        Raises:
            InvalidArgumentError: `max_in_flight` or `timeout` is not positive; or as for `attend`.
            AttentionClientError: A request was refused, or the stream broke.
        """
        plan = plan_stream(
            Ask(model=model, version=version, return_weights=return_weights),
            return_exceptions=return_exceptions,
            max_in_flight=max_in_flight,
            timeout=timeout,
            default=self._timeout,
        )
        return attend_stream(self._open_stream, iter(requests), plan)

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """Lists every model, those that failed to load included; sorted by name, then by version."""
        response = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [ModelInfo.from_proto(model) for model in response.models]

    def model(self, name: str, version: str = "", *, timeout: float | None = None) -> ModelInfo:
        """Describes one model; an empty version means its highest.

        Raises:
            NotFoundError: There is no such model or version.
        """
        request = pb.GetModelRequest(name=name, version=version)
        return ModelInfo.from_proto(self._call(self._stub.GetModel, request, timeout).model)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Returns once the server says that it is ready; a refused connection is tried again.

        Raises:
            DeadlineExceededError: It did not within `timeout` seconds; the message says what was seen last.
            AttentionClientError: The server refuses the question, which waiting does not cure.
        """
        readiness = Readiness(self._target, seconds(timeout, default=self._timeout))
        wait_until_ready(self._channel, readiness)

    def _attend(self, call: EncodedCall, timeout: float | None) -> AttentionResult[Any]:
        return decode_result(self._call(self._stub.Attend, call.request, timeout), call.layout)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]",
        request: _RequestT,
        timeout: float | None,
    ) -> _ResponseT:
        with translated():
            return method(request, timeout=seconds(timeout, default=self._timeout))

    def _open_stream(self, requests: Iterator[pb.AttendStreamRequest], timeout: float | None) -> StreamCall:
        return self._stub.AttendStream(requests, timeout=timeout)
