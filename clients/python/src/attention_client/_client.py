"""The synchronous client, and the asynchronous client with the same methods.

Notation: "..." the leading axes of a batch, T rows of a sequence, Tq query rows, Tk key rows, H heads,
d elements of a row.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from attention_client._calls.attention import AttendInputs, encode_texts, encode_tokens, encode_vectors
from attention_client._calls.contexts import Context, read_parts
from attention_client._calls.embeddings import (
    EmbedInputs,
    SpanList,
    SpanLists,
    encode_embeddings,
    encode_rerank,
    encode_scores,
    encode_tokenize,
)
from attention_client._calls.named import encode_infer
from attention_client._connection.aio import AsyncConnection
from attention_client._connection.settings import seconds
from attention_client._connection.streams import StreamItem, StreamSettings
from attention_client._connection.sync import Connection
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._models import ModelInfo
from attention_client._values import (
    MAX_INDEX,
    Arrays,
    AttentionResult,
    EmbeddingInputs,
    FloatArray,
    InferResult,
    Output,
    OutputType,
    Ranking,
    ReturnWeights,
    TextInputs,
    Texts,
    TokenInputs,
    Version,
    whole_number,
)

_ParametersT = ParamSpec("_ParametersT")
_ResultT = TypeVar("_ResultT")
Side: TypeAlias = Literal["right", "left"]
InputKind: TypeAlias = Literal["query", "document", "classification", "clustering"]
# More than the memory of any machine holds.
MAX_IN_FLIGHT = 1_000_000


class AttentionClient(Connection):
    """Computes context vectors on one or several attention servers. Safe to share between threads.

    Every error is an AttentionClientError; `attention_client.errors` shows its subclasses.

    A call that fails with UNAVAILABLE is repeated with exponential backoff, which is safe: a call that
    arrives twice changes nothing more on the server. A stream is repeated only until its first response. A
    call waits for a server that is starting or restarting until its timeout.

    Args:
        target: HOST:PORT, another target of gRPC's such as `unix:PATH`, or several HOST:PORT. Calls are
            distributed round robin over several targets and over all addresses of a DNS name. Several targets
            are resolved once, when the client is created; a single name is resolved again when a connection
            is lost. Several targets must serve the same artifacts: if two answers are of the same model and
            version and their digests differ, the call raises ModelChangedError. gRPC connects through the
            proxy in the environment variable grpc_proxy, https_proxy or http_proxy, except to this machine,
            to hosts in no_proxy, and with `channel_options={"grpc.enable_http_proxy": 0}`.
        credentials: Credentials of the connection: `TlsFiles`, which are read again when they change, or
            gRPC's, such as `grpc.ssl_channel_credentials()`; None means an unencrypted connection.
        token: Sent with every call as `authorization: Bearer TOKEN`. Without credentials it is accepted only
            for targets on this machine.
        metadata: Keys and values sent with every call. Values are printable ASCII text, or bytes for keys
            that end with "-bin".
        timeout: Seconds that a call may take unless the call states its own timeout; positive and finite.
        max_retries: Largest number of times a call that failed with UNAVAILABLE is repeated, from 0 to 4;
            0 means never.
        attempt_timeout: Seconds after which an attempt that was not answered counts as failed, so that the
            call is repeated on the next server; positive and finite. It includes the wait for a connection,
            does not apply to streams, and must exceed the time of the slowest run. None means no limit: the
            connection finds out that a server is frozen, after at most 20 seconds.
        wait_for_ready: Whether a call waits for a connection until its timeout. If False, a call that cannot
            connect fails after `max_retries` retries, which take less than two seconds.
        compression: "gzip" or "deflate" compresses requests; None means no compression.
        wire: "fp16" or "bf16" sends vectors, results and attention weights with half the bytes of "fp32",
            rounded to the nearest number. The model computes as it does otherwise, and results are float32
            arrays. "fp16" keeps 11 bits of a number, up to 65,504; "bf16" keeps 8 bits and the range of fp32.
        max_message_bytes: Largest request and largest response in bytes, from 1 to 2**31 - 1. The server has
            a limit of its own, `--max-message-bytes`.
        channel_options: Further options of gRPC's channel, which take precedence over the client's own.

    Raises:
        InvalidArgumentError: An argument has a wrong type or a value outside its range.
        UnavailableError: One of several targets cannot be resolved.
    """

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
        context: Context | str | None = None,
        return_weights: ReturnWeights = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> AttentionResult[Any]:
        """Computes context vectors; the result has the form of the query.

        Arrays may be NumPy arrays, PyTorch tensors on the CPU, pandas Series and frames, or nested lists.

        Args:
            model: Name of the model.
            query: One sequence (Tq, d), a batch (..., Tq, d) with any number of leading axes, or a list,
                tuple or Series of (Tq_i, d). Real numbers of any type, sent as float32; a finite number that
                float32 cannot represent is refused. A nested list of depth 2 is one sequence.
            key: For cross-attention: the same form as the query, with the same leading axes or as many
                sequences.
            value: For models that separate it from the key: as many rows as the key.
            mask: Booleans, True = may attend. (Tk,), (Tq, Tk) or (H, Tq, Tk) for one sequence, the same after
                the leading axes for a batch, or a list of them, all of one rank, for a list.
            lengths: For a batch only: integers with the shape of the leading axes, the number of valid rows
                of each key sequence; in self-attention, of each sequence. The other rows are not sent, and
                their results are zeros.
            positions: For models with rotary position embedding: integers (Tq,), (..., Tq) or a list of
                (Tq_i,), in the form of the query. None means 0 to Tq - 1 in each sequence. With a context,
                for every model to which positions matter: those of the query rows among its rows; by default
                0 to Tq - 1 for cross-attention, and its last rows for self-attention.
            context: A stored context in place of key, value and lengths, also for self-attention modules: a
                `Context`, or the id of one. Masks span its rows.
            return_weights: Whether to return the attention weights as well; a `HeadSelection` chooses layers
                and heads.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Raises:
            InvalidArgumentError: An argument has a wrong type or shape, or the server refuses it.
            LimitExceededError: The request is larger than a limit of the server or of the client.
            OverloadedError: The server's queue is full.
            AttentionClientError: The call failed for another reason.
        """
        options = self._options(model, version, weights=return_weights)
        inputs = AttendInputs(query, key, value, mask, lengths, positions, context)
        return self._answer(encode_vectors(options, inputs), timeout)

    def attend_text(
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
        """Computes self-attention over the tokens of one text or of several; otherwise as `attend`.

        Args:
            model: Name of the model.
            text: One text, or a list of texts.
            mask: As in `attend`.
            return_weights: Whether to return the attention weights as well; a `HeadSelection` chooses layers
                and heads.
            return_offsets: Whether to return the characters of each token as well, as `offsets`.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.
        """
        options = self._options(model, version, weights=return_weights)
        return self._answer(encode_texts(options, TextInputs(text, mask, return_offsets)), timeout)

    def attend_tokens(
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
        """Computes self-attention over token ids; otherwise as `attend`.

        Args:
            model: Name of the model.
            token_ids: Integers (T,), (..., T) or a list of (T_i,).
            mask: As in `attend`.
            lengths: As in `attend`.
            return_weights: Whether to return the attention weights as well; a `HeadSelection` chooses layers
                and heads.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.
        """
        options = self._options(model, version, weights=return_weights)
        return self._answer(encode_tokens(options, TokenInputs(token_ids, mask, lengths)), timeout)

    def embed(  # noqa: PLR0913 - one parameter is one option
        self,
        model: str,
        inputs: EmbedInputs,
        *,
        prompt: str | None = None,
        input_kind: InputKind | None = None,
        dimensions: int | None = None,
        truncate: bool | None = None,
        truncation_side: Side | None = None,
        output_type: OutputType = "float32",
        normalised: bool | None = None,
        spans: SpanList | SpanLists | None = None,
        sparse: bool = False,
        outputs: Sequence[Output] | None = None,
        top_k: int | None = None,
        timeout: float | None = None,
        version: Version = "",
    ) -> Any:
        """Computes one embedding for each text, or for each of its parts, with a text encoder.

        More than 1,024 texts, 4,096 parts, or 16,384 characters whose token vectors are returned, are sent in
        several requests, one after the other.

        Args:
            model: Name of the model.
            inputs: One text, or a list of texts; or token ids (T,), (B, T) or a list of (T_i,).
            prompt: Name of the prompt that is put before each text, "" for none; None means the model's own.
            input_kind: What the texts are, in place of `prompt`: "query", "document", "classification" or
                "clustering". A model without a prompt of this kind uses its own.
            dimensions: Number of leading elements that are returned, normalised again if the model
                normalises; None means all. The model lists what it allows.
            truncate: Whether texts with more tokens than the model takes are cut rather than refused; None
                means the model's setting, and then texts that were cut raise a `TextTruncatedWarning`.
            truncation_side: Which end of a text that is cut loses tokens: "right", or "left", where the
                prompt is; None means the model's setting.
            output_type: "int8" and "uint8" return an integer for each element, by the range that `model(...)`
                states; "ubinary" a bit, 1 above 0, packed as `numpy.packbits` packs them, and "binary" the
                same less 128 as int8.
            normalised: Whether embeddings have length 1; None means as the model has them.
            spans: Parts of the texts that get an embedding each, computed in the context of the whole text
                (late chunking): pairs of the first and the exclusive last character, in characters of the
                str. A list of pairs for one text, otherwise a list of such lists, one for each text and
                possibly empty. The vectors of the tokens that overlap a part are pooled as those of a text
                are. Parts may overlap; each must lie within its text, not beyond where it is cut, and
                overlap a token. For token ids, positions of tokens. None means one embedding for each text.
            sparse: Whether to return sparse embeddings in place of dense ones.
            outputs: What to return as `Embeddings`, all of it from one run: one or more of "dense", "sparse"
                and "token_vectors". None means dense embeddings, as an array.
            top_k: Largest number of weights of a sparse embedding, from 1, of which the largest are returned;
                None means all that the model has.
            timeout: Seconds for each request; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Returns:
            float32, or integers of `output_type`: (d,) for one text or sequence, otherwise (B, d). With
            spans, (n, d) for one text or sequence with n of them, otherwise a list of (n_i, d). Of bits, the
            last axis has ceil(d / 8) bytes. If `sparse`, a `SparseVector` for one text or sequence, otherwise
            a list of them. With `outputs`, `Embeddings`.

        Raises:
            InvalidArgumentError: An argument has a wrong type or value, or the server refuses it.
            LimitExceededError: A text has too many tokens, a span lies beyond where its text is cut, or
                another limit is exceeded.
            AttentionClientError: The call failed for another reason.
        """
        embed = EmbeddingInputs(
            inputs, prompt, dimensions, truncate, input_kind, truncation_side, output_type, normalised
        )
        embed = replace(embed, sparse=sparse, outputs=outputs, top_k=top_k)
        return self._answer(encode_embeddings(self._options(model, version), embed, spans), timeout)

    def rerank(
        self,
        model: str,
        query: str,
        texts: Texts | None = None,
        *,
        context: Context | str | None = None,
        top_n: int | None = None,
        prompt: str | None = None,
        truncate: bool | None = None,
        truncation_side: Side | None = None,
        raw_scores: bool = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> list[Ranking]:
        """Sorts texts by their relevance to a query; the most relevant come first.

        With a reranker, or with a multi-vector encoder, whose scores are MaxSim.

        Of equally relevant texts, the earlier one comes first; those whose score is NaN come last. More than
        1,024 texts are sent in several requests, one after the other.

        Args:
            model: Name of the model, which has one label or is a multi-vector encoder.
            query: The first text of every pair.
            texts: The texts; each is the second text of a pair.
            context: For multi-vector encoders, stored documents in place of texts: a `Context`, or the id of
                one. Rankings have the places of documents in the order in which they were put.
            top_n: Number of rankings that are returned, from 1; None means all.
            prompt: Name of one of the model's prompts, such as an instruction; empty for none. None means the
                model's default prompt, if it has one.
            truncate: Whether pairs with more tokens than the model takes are cut rather than refused: the
                longer text first, and then both. None means the model's setting, and then pairs that were cut
                raise a `TextTruncatedWarning`.
            truncation_side: As in `embed`; of a pair, both texts lose tokens at this end.
            raw_scores: Whether scores are those before the model's activation (logits).
            timeout: Seconds for each request; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Raises:
            InvalidArgumentError: An argument has a wrong type or value, or the model has several labels, or
                is neither a text classifier nor a multi-vector encoder.
            LimitExceededError: A pair has too many tokens, or another limit is exceeded.
            AttentionClientError: The call failed for another reason.
        """
        options = self._options(model, version)
        text_options = {"prompt": prompt, "truncate": truncate, "truncation_side": truncation_side}
        call = encode_rerank(options, query, texts, top_n, context, raw_scores=raw_scores, **text_options)
        return self._answer(call, timeout)

    def classify(
        self,
        model: str,
        texts: str | Texts,
        pairs: str | Texts | None = None,
        *,
        prompt: str | None = None,
        truncate: bool | None = None,
        truncation_side: Side | None = None,
        raw_scores: bool = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> FloatArray:
        """Computes the score of each label for texts or pairs of texts, with a text classifier.

        `model(...)` names the labels, as `text_classifier.labels`. Errors and several requests are as in
        `rerank`.

        Args:
            model: Name of the model.
            texts: One text, or a list of texts.
            pairs: The second text of each pair: in the form of `texts`; None for single texts.
            prompt: As in `rerank`.
            truncate: As in `rerank`.
            truncation_side: As in `rerank`.
            raw_scores: As in `rerank`.
            timeout: Seconds for each request; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Returns:
            float32: (L,) for one text or pair, otherwise (B, L).
        """
        options = self._options(model, version)
        text_options = {"prompt": prompt, "truncate": truncate, "truncation_side": truncation_side}
        call = encode_scores(options, texts, pairs, raw_scores=raw_scores, **text_options)
        return self._answer(call, timeout)

    def tokenize(
        self,
        model: str,
        texts: str | Texts,
        *,
        prompt: str | None = None,
        input_kind: InputKind | None = None,
        omit_special_tokens: bool = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> Any:
        """Turns texts, which may be longer than a model takes, into tokens with its tokenizer.

        Args:
            model: Name of the model.
            texts: One text, or a list of texts.
            prompt: As in `embed`.
            input_kind: As in `embed`.
            omit_special_tokens: Whether to leave out the special tokens that the model adds to each text.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Returns:
            A `TokenizedText` for one text, otherwise a list of them.

        Raises:
            InvalidArgumentError: An argument has a wrong type or value, or the server refuses it.
            AttentionClientError: The call failed for another reason.
        """
        text_options = {"prompt": prompt, "input_kind": input_kind}
        request, decode = encode_tokenize(
            self._options(model, version), texts, omits_special=omit_special_tokens, **text_options
        )
        return self._run(self._ask("Tokenize", request, decode, timeout))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Arrays],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: Version = "",
    ) -> InferResult:
        """Computes any model's outputs from its inputs, by the names that `model()` lists.

        Args:
            model: Name of the model.
            inputs: By name, real numbers, sent as float32, or integers or booleans. One sequence without the
                batch axis, such as (T, d) or (T,); a batch, with it; or a list, tuple or Series with one
                array for each sequence, where an axis is a sequence. Nested lists of numbers are an array if
                their lengths agree, and a list of sequences otherwise. The input `attention_mask` is (Tk,),
                (Tq, Tk) or (H, Tq, Tk) for each sequence, True = may attend.
            outputs: Names of the outputs to return; None means those that are not optional.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Raises:
            InvalidArgumentError: An input has a wrong name, type or shape; `field` names it.
            LimitExceededError: The request is larger than a limit of the server or of the client.
            AttentionClientError: The call failed for another reason.
        """
        return self._answer(encode_infer(self._options(model, version), inputs, outputs), timeout)

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
    ) -> Generator[Any, None, None]:
        """Computes context vectors for many requests on one stream; yields their results in order.

        Another thread reads the requests, at most `max_in_flight` ahead of the results, so the iterable may
        be endless. An exception that it raises is raised here, after the results of the requests before it.
        Closing the generator cancels the call.

        Args:
            model: Name of the model.
            requests: An iterable. Each is a query as in `attend`, or AttendInputs, TokenInputs, TextInputs
                or EmbeddingInputs. Only an AsyncAttentionClient takes an asynchronous iterable.
            return_exceptions: Whether to yield the error of a refused request in place of its result and
                continue, rather than raise it.
            return_weights: Whether to return the attention weights as well; a `HeadSelection` chooses layers
                and heads.
            max_in_flight: Largest number of requests read and not yet answered, 1 or more.
            timeout: Seconds for the whole stream. None means no limit; the client's timeout then bounds the
                wait for each result.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Raises:
            InvalidArgumentError: `max_in_flight` or `timeout` is not positive, or as for `attend`.
            ModelChangedError: The version of the model was replaced while the stream ran.
            AttentionClientError: A request was refused, or the stream ended early.
        """
        settings = StreamSettings(
            options=self._options(model, version, weights=return_weights),
            return_exceptions=return_exceptions,
            max_in_flight=whole_number("max_in_flight", max_in_flight, 1, MAX_IN_FLIGHT),
            timeout=None if timeout is None else seconds(timeout),
            idle_timeout=self._timeout if timeout is None else None,
        )
        return self._stream(requests, settings)

    def context(
        self,
        model: str,
        key: Arrays | None = None,
        value: Arrays | None = None,
        *,
        texts: Texts | None = None,
        truncate: bool | None = None,
        mask: Arrays | None = None,
        ttl: int | None = None,
        shared: bool = False,
        timeout: float | None = None,
        version: Version = "",
    ) -> Context:
        """Puts key and value rows on the server, or documents, for calls with `context=`.

        The server projects rows, and encodes documents, once. To put the same ones again takes no further
        memory.

        Args:
            model: Name of the model.
            key: Key rows, (T, d); for self-attention modules, of the query's width.
            value: Value rows, for models that separate them from the key.
            texts: For multi-vector encoders, in place of rows: documents.
            truncate: Whether documents with more tokens than the model takes are cut rather than refused;
                None means the model's setting.
            mask: Booleans (T,): False hides a row from every query.
            ttl: Seconds until the context expires, an integer from 1; None means the server's default, an
                hour.
            shared: Whether callers with other identities may use and list it.
            timeout: Seconds; None means the client's timeout.
            version: Version of the model as an integer or a str; empty means the highest that is ready.

        Raises:
            InvalidArgumentError: An argument has a wrong type or shape, or the server refuses it.
            ResourceExhaustedError: The server has no room for it.
            AttentionClientError: The call failed for another reason.
        """
        options = self._options(model, version)
        lifetime = 0 if ttl is None else whole_number("ttl", ttl, 1, MAX_INDEX)
        parts = read_parts(key, value, mask, texts)
        context = Context(self, options, parts, truncate=truncate, ttl=lifetime, shared=shared)

        async def put() -> Context:
            await context._put(timeout)
            return context

        return self._run(put())

    def contexts(self, model: str, version: Version = "", *, timeout: float | None = None) -> list[Context]:
        """Lists the caller's own contexts of a model and those that others share, the last used first.

        Each 1,000 of them are a call of their own, which may take `timeout` seconds.
        """
        options = self._options(model, version)

        async def pages() -> list[Context]:
            request = pb.ListContextsRequest(model_name=options.model, model_version=options.version)
            contexts: list[Context] = []
            while True:
                page = await self._ask("ListContexts", request, lambda response: response, timeout)
                contexts += [Context(self, options, stored=stored) for stored in page.contexts]
                request.page_token = page.next_page_token
                if not request.page_token:
                    return contexts

        return self._run(pages())

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """Lists all models, including those that failed to load, sorted by name and then by version."""

        def decode(response: pb.ListModelsResponse) -> list[ModelInfo]:
            return [ModelInfo.from_proto(model) for model in response.models]

        return self._run(self._ask("ListModels", pb.ListModelsRequest(), decode, timeout))

    def model(self, name: str, version: Version = "", *, timeout: float | None = None) -> ModelInfo:
        """Describes one model; an empty version means the highest that is ready.

        Raises:
            NotFoundError: The server does not have this model or version.
        """
        options = self._options(name, version)
        request = pb.GetModelRequest(name=options.model, version=options.version)
        ask = self._ask("GetModel", request, lambda response: ModelInfo.from_proto(response.model), timeout)
        return self._run(ask)

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Asks the server once, over grpc.health.v1, whether it is ready to answer.

        Args:
            timeout: Seconds; None means the client's timeout.

        Raises:
            UnavailableError: No server can be reached.
            AttentionClientError: The server refuses the call.
        """
        return self._run(self._is_ready(timeout))

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until the server reports that it is ready, over grpc.health.v1; reconnects while it starts.

        Args:
            timeout: Seconds; None means the client's timeout.

        Raises:
            DeadlineExceededError: The server was not ready in time; the message states its last status.
            AttentionClientError: The server refuses the call, and waiting does not help.
        """
        return self._run(self._wait_until_ready(timeout))


def _awaited(
    method: Callable[Concatenate[AttentionClient, _ParametersT], _ResultT],
) -> Callable[Concatenate["AsyncAttentionClient", _ParametersT], Coroutine[Any, Any, _ResultT]]:
    """A method of the synchronous client, whose steps are awaited: on this client it returns them."""

    @wraps(method)
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return await method(self, *arguments, **options)  # type: ignore[misc]

    call.__doc__ = f"As `AttentionClient.{method.__name__}`."
    return call  # type: ignore[return-value]  # the wrapper has the parameters of the method


def _streamed(
    method: Callable[Concatenate[AttentionClient, _ParametersT], Any],
) -> Callable[Concatenate["AsyncAttentionClient", _ParametersT], AsyncGenerator[Any, None]]:
    return method  # type: ignore[return-value]  # it works on either client


class AsyncAttentionClient(AsyncConnection):
    """AttentionClient for asyncio: the same arguments, the same errors, and the same calls, to be awaited.

    Create it inside a running event loop, and use it on that loop only: one client for each `asyncio.run`.

    `attend_stream` returns an asynchronous generator, which is not awaited. It takes an iterable or an
    asynchronous iterable. An iterable is read on the event loop and must not block. Closing the generator
    (`aclose`, or contextlib.aclosing around it) cancels the call; leaving the loop does so some time later.
    """

    attend = _awaited(AttentionClient.attend)
    attend_text = _awaited(AttentionClient.attend_text)
    attend_tokens = _awaited(AttentionClient.attend_tokens)
    attend_stream = _streamed(AttentionClient.attend_stream)
    embed = _awaited(AttentionClient.embed)
    rerank = _awaited(AttentionClient.rerank)
    classify = _awaited(AttentionClient.classify)
    tokenize = _awaited(AttentionClient.tokenize)
    infer = _awaited(AttentionClient.infer)
    context = _awaited(AttentionClient.context)
    contexts = _awaited(AttentionClient.contexts)
    models = _awaited(AttentionClient.models)
    model = _awaited(AttentionClient.model)
    is_ready = _awaited(AttentionClient.is_ready)
    wait_until_ready = _awaited(AttentionClient.wait_until_ready)
