"""The synchronous client: changes with the list of calls.

Notation: "..." the leading axes of a batch, T rows of a sequence, Tq query rows, Tk key rows, H heads,
d elements of a row.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike

from attention_client._connection_sync import Connection
from attention_client._decoding import decode_result
from attention_client._encoding import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._models import ModelInfo
from attention_client._stream_sync import StreamCall, attend_stream
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


class AttentionClient(Connection):
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

    @overload
    def attend(
        self,
        model: str,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        **options: Unpack[AttendOptions],
    ) -> AttentionResult[FloatArray]: ...
    @overload
    def attend(
        self,
        model: str,
        query: Sequence[ArrayLike],
        key: Sequence[ArrayLike] | None = None,
        value: Sequence[ArrayLike] | None = None,
        **options: Unpack[AttendOptions],
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
        positions: Arrays | None = None,
        return_weights: bool = False,
        timeout: float | None = None,
        version: str = "",
    ) -> AttentionResult[Any]:
        """Computes context vectors and answers in the kind of the query.

        Args:
            model: Name of the model.
            query: One sequence (Tq, d), a batch (..., Tq, d) with any number of leading axes, or a list or
                tuple of (Tq_i, d); real numbers of any type, sent as float32.
            key: For cross-attention; of the same kind, with the same leading axes or as many sequences.
            value: For models that separate it from the key; as many rows as the key.
            mask: Booleans, True = may attend. (Tk,), (Tq, Tk) or (H, Tq, Tk) for one sequence; the same
                with the leading axes before it for a batch; a list of them, all of one rank, for a list.
            lengths: Integers of the shape of the leading axes, for a batch only: how many rows of each key
                sequence are valid; in self-attention, of each sequence. The others are not sent, and their
                results are zeros.
            positions: For models with rotary position embedding: integers (Tq,), (..., Tq) or a list of
                (Tq_i,), of the query's kind; None for 0 to Tq - 1 in each sequence.
            return_weights: Whether to return the attention weights too.
            timeout: Seconds; None for the client's.
            version: Version of the model; empty for the highest that answers.

        Raises:
            InvalidArgumentError: An argument has a wrong type or shape, or the server refuses it.
            AttentionClientError: There is no result for another reason.
        """
        ask = Ask(model=model, version=version, return_weights=return_weights)
        call = encode_vectors(ask, AttendInputs(query, key, value, mask, lengths, positions))
        return self._attend(call, timeout)

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
        """Self-attention over token ids, integers (T,), (..., T) or a list of (T_i,); else as `attend`."""
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
            requests: Each a query as of `attend`, AttendInputs for more, TokenInputs or TextInputs.
            return_exceptions: Whether to yield the error of a refused request in its place and go on,
                rather than raise it.
            return_weights: Whether to return the attention weights too.
            max_in_flight: Most requests read and not yet answered.
            timeout: Seconds for the whole stream; None for no such limit, and then the client's timeout
                bounds the wait for each answer instead.
            version: Version of the model; empty for the highest that answers.

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
        """Describes one model; an empty version means the highest that answers.

        Raises:
            NotFoundError: There is no such model or version.
        """
        request = pb.GetModelRequest(name=name, version=version)
        return ModelInfo.from_proto(self._call(self._stub.GetModel, request, timeout).model)

    def _attend(self, call: EncodedCall, timeout: float | None) -> AttentionResult[Any]:
        return decode_result(self._call(self._stub.Attend, call.request, timeout), call.layout)

    def _open_stream(self, requests: Iterator[pb.AttendStreamRequest], timeout: float | None) -> StreamCall:
        return self._stub.AttendStream(requests, timeout=timeout)
