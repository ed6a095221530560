"""What computes for a job: the interface, and servers on one queue, of which a faster one gets more requests.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc

from attention_client import (
    AttendInputs,
    AttentionClient,
    AttentionClientError,
    Context,
    EmbeddingInputs,
    ModelInfo,
    TextInputs,
    TlsFiles,
    TokenInputs,
    errors,
)
from attention_client._connection.settings import addresses_of
from attention_client._connection.streams import StreamItem, encode_request
from attention_client._values import AnyResult
from attention_client.enrich.model import JobModel
from attention_client.enrich.options import EnrichOptions, Role, check_values
from attention_client.enrich.outcome import EnrichError, RefusedError, ServersUnavailableError

# Sequences that are computed together, for each input: (T, d) float32, (T,) int64, or texts.
BackendRequest: TypeAlias = "Mapping[Role, Sequence[Any]]"
log = logging.getLogger(__name__)
# Requests that one server computes at the same time.
MAX_IN_FLIGHT = 8
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
# How long a job that has not begun waits for a server to be ready, at most.
START_SECONDS, START_PAUSE_SECONDS = 30.0, 0.5
TRANSIENT = (
    errors.UnavailableError,
    errors.DeadlineExceededError,
    errors.CallCancelledError,
    errors.ResourceExhaustedError,
)


class Backend(Protocol):
    """Computes requests, several at the same time.

    Attributes:
        model: The model.
        concurrency: How many requests it computes at the same time, 1 or more. The job submits a few more
            than that, so that the backend is never idle.
        tokenizer: File or folder of the model's tokenizer; None if it has none here.
    """

    model: JobModel
    concurrency: int
    tokenizer: Path | None

    def encode_texts(self, texts: Sequence[str]) -> tuple[Sequence[Any], Collection[int]]:
        """Encodes texts before they are submitted, on the thread of the caller, while requests are computed.

        A backend that computes elsewhere returns the texts as they are.

        Returns:
            For each text what a request has: its token ids (T,) int64, or the text itself; or a RefusedError.
            And the positions of the texts that were cut.
        """

    def count_tokens(self, text: str, *, prompt: str | None) -> int:
        """Tokens of a text as a text encoder computes it, with special tokens and the prompt of that name.

        Raises:
            EnrichError: The model refuses the text or the prompt.
        """

    def submit(self, request: BackendRequest) -> Callable[[], AnyResult]:
        """Starts to compute a request.

        Returns:
            Waits for the result, in the order of the request; a model that pools returns (d,) or (1, d) for
            each sequence. It raises `RefusedError` if the model refuses the request, and any other error
            if the job cannot continue.
        """

    def close(self) -> None:
        """Cancels requests that have not started, and releases all resources."""


class ServerBackend:
    """One model on one or several servers.

    Requests of a server that fails are sent again to any server. If none has answered for `retry_seconds`,
    the job ends.

    Attributes:
        failures: How many requests each server failed to answer, by its address.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        options: EnrichOptions,
        *,
        retry_seconds: float,
        credentials: grpc.ChannelCredentials | TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """Connects to each server and asks it for the model.

        Waits until one server is ready. The job begins without those that are not, and asks them again.

        Args:
            targets: Servers as HOST:PORT. Each address of a host name is a server of its own.
            options: Options of the job. Without a version, it is the highest of the first server.
            retry_seconds: Seconds without any answer after which the job ends, 0 or more.
            credentials: Credentials of the connections; None means unencrypted ones.
            token: Sent with every call.

        Raises:
            ServersUnavailableError: No server is ready; or, if `retry_seconds` is 0, one of them is not.
            EnrichError: A server does not have the model, or has another version of it; or the credentials
                cannot be used.
        """
        check_values({"retry_seconds": retry_seconds})
        self.failures: Counter[str] = Counter()
        with ExitStack() as opened:
            self._clients = _connect(opened, targets, credentials, token)
            self._first, info = self._describe(options, retry_seconds)
            self.model, self._memory = JobModel.read(info, options)
            self._connections = opened.pop_all()
        # The memory on each server.
        self._contexts: dict[str, Context] = {}
        self._locks = {target: threading.Lock() for target in self._clients}
        self.tokenizer = options.tokenizer
        self._options = options
        self.concurrency = MAX_IN_FLIGHT * len(self._clients)
        self._retry_seconds = retry_seconds
        self._requests: queue.SimpleQueue[tuple[BackendRequest, Future[AnyResult]] | None]
        self._requests = queue.SimpleQueue()
        self._answered_at = time.monotonic()
        self._ended = threading.Event()
        self._failure: EnrichError | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(target,), name="enrich", daemon=True)
            for target in self._clients
            for _ in range(MAX_IN_FLIGHT)
        ]
        for thread in self._threads:
            thread.start()

    def encode_texts(self, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[int]]:
        """The texts as they are: servers encode them."""
        return texts, ()

    def count_tokens(self, text: str, *, prompt: str | None) -> int:
        """See Backend. Asks the first server that was ready."""
        try:
            options: Any = {"outputs": self._options.outputs and self._options.heads}
            options["input_kind"] = self._options.input_kind if prompt is None else None
            result = self._ask(self._first, EmbeddingInputs([text], prompt, **options))
        except AttentionClientError as error:
            raise EnrichError(f"{self.model.name}: {error.message}") from error
        return int(result.token_counts[0])

    def submit(self, request: BackendRequest) -> Callable[[], AnyResult]:
        """See Backend."""
        future: Future[AnyResult] = Future()
        self._answered_at = time.monotonic()  # the servers may have had nothing to answer for long
        self._requests.put((request, future))
        return future.result

    def close(self) -> None:
        """See Backend. Requests in progress are cancelled."""
        self._fail(EnrichError("the job has ended"))
        for _ in self._threads:
            self._requests.put(None)
        self._connections.close()
        for thread in self._threads:
            thread.join()

    def _describe(self, options: EnrichOptions, retry_seconds: float) -> tuple[str, ModelInfo]:
        """The address of the first server that is ready, and its model."""
        until = time.monotonic() + min(retry_seconds, START_SECONDS)
        while True:
            models: dict[str, ModelInfo] = {}
            failures: dict[str, AttentionClientError] = {}
            for target, client in self._clients.items():
                try:
                    if not client.is_ready():
                        raise errors.UnavailableError("the server is not ready")
                    models[target] = client.model(options.model, options.version)
                except TRANSIENT as error:
                    failures[target] = error
                except AttentionClientError as error:
                    raise EnrichError(str(error)) from error
            if models or time.monotonic() > until:
                break
            time.sleep(START_PAUSE_SECONDS)
        if failures and not (models and retry_seconds):
            raise ServersUnavailableError("; ".join(f"{target}: {e}" for target, e in failures.items()))
        for target, cause in failures.items():
            log.warning("the job begins without the server %s: %s", target, cause)
            self.failures[target] += 1
        return next(iter(models.items()))

    def _serve(self, target: str) -> None:
        """Computes requests on one server until the job ends. An unexpected error ends it too."""
        backoff = MIN_BACKOFF_SECONDS
        while (queued := self._requests.get()) is not None:
            request, future = queued
            if self._failure is not None:
                future.set_exception(self._failure)
                continue
            try:
                result = self._ask(target, self._inputs_of(request, self._context(target)))
            except errors.InvalidArgumentError as error:
                self._answered_at = time.monotonic()
                future.set_exception(RefusedError(error.message, error.reason))
            except TRANSIENT as error:
                self._requests.put(queued)
                self._note_failure(target, error)
                # Spreads the retries of many threads and clients.
                self._ended.wait(backoff * random.uniform(0.5, 1))  # noqa: S311
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
            except Exception as error:
                log.debug("a request to %s failed", target, exc_info=True)
                self._fail(EnrichError(f"{target}: {error}"))
                future.set_exception(self._failure)
            else:
                self._answered_at, backoff = time.monotonic(), MIN_BACKOFF_SECONDS
                future.set_result(result)

    def _inputs_of(self, request: BackendRequest, context: Context | None) -> StreamItem:
        """A request as the client takes it."""
        options, query = self._options, list(request[Role.QUERY])
        if self.model.text_encoder is not None:
            return embedding_inputs(options, query)
        if isinstance(query[0], str):
            return TextInputs(query)
        if query[0].ndim == 1:
            return TokenInputs(query)
        inputs: dict[str, Any] = {str(role): list(rows) for role, rows in request.items()}
        return AttendInputs(**inputs, context=context)

    def _ask(self, target: str, inputs: StreamItem) -> AnyResult:
        """The answer of a server, which states the model that it is from; a refusal by the model does too."""
        client, model = self._clients[target], self.model
        options = client._options(model.name, model.version, weights=self._options.weights)
        try:
            result = client._answer(encode_request(inputs, options), None)
        except errors.InvalidArgumentError as error:
            model.check(error.model_digest or model.digest)
            raise
        model.check(result.model_digest)
        return result

    def _context(self, target: str) -> Context | None:
        """The memory of the job on one server, to which it is sent once, and again if the server loses it."""
        with self._locks[target]:
            if self._memory and target not in self._contexts:
                put, model = self._clients[target].context, self.model
                try:
                    self._contexts[target] = put(model.name, *self._memory, version=model.version)
                except errors.InvalidArgumentError as error:
                    raise EnrichError(f"the context cannot be used: {error.message}") from error
        return self._contexts.get(target)

    def _note_failure(self, target: str, error: AttentionClientError) -> None:
        """Counts a failure; ends the job if no server has answered for too long."""
        log.info("a request to %s failed and is sent again: %s", target, error)
        if not isinstance(error, errors.ResourceExhaustedError):
            with self._locks[target]:
                self.failures[target] += 1
        if time.monotonic() - self._answered_at > self._retry_seconds:
            silence = f"no server has answered for {self._retry_seconds:g} s; the last error: {error}"
            self._fail(ServersUnavailableError(f"{silence}. --resume (resume=True) continues the job"))

    def _fail(self, failure: EnrichError) -> None:
        """Ends the job: requests that are queued fail."""
        self._failure = failure
        self._ended.set()


def embedding_inputs(options: EnrichOptions, texts: Sequence[str]) -> EmbeddingInputs:
    """The request of a text encoder for some texts, as the client takes it."""
    outputs: Any = options.outputs and options.heads
    return EmbeddingInputs(
        texts,
        options.prompt,
        options.dimensions,
        options.truncate,
        options.input_kind,
        output_type=options.output_type or "float32",
        outputs=outputs,
        top_k=options.top_k,
    )


def _connect(
    opened: ExitStack,
    targets: str | Sequence[str],
    credentials: grpc.ChannelCredentials | TlsFiles | None,
    token: str | None,
) -> dict[str, AttentionClient]:
    """A client for each address of each target; `opened` closes them."""
    if not targets:
        raise EnrichError("name at least one server as HOST:PORT")
    clients: dict[str, AttentionClient] = {}
    try:
        for target in [targets] if isinstance(targets, str) else targets:
            for address in resolve(target):
                client = AttentionClient(
                    address,
                    credentials=credentials,
                    token=token,
                    # Requests that fail are queued again, so the client itself must not retry.
                    max_retries=0,
                    wait_for_ready=False,
                    # The certificate has the name that was given, not the address.
                    channel_options={"grpc.default_authority": target} if address != target else None,
                )
                clients[address] = opened.enter_context(client)
    except AttentionClientError as error:
        raise EnrichError(str(error)) from error
    return clients


def resolve(target: str) -> list[str]:
    """Every address of a host name, each as HOST:PORT.

    Args:
        target: HOST:PORT; any other gRPC target, such as unix:/PATH, is returned as it is.

    Raises:
        AttentionClientError: The host name is unknown, or the port is too large.
    """
    _, separator, port = target.rpartition(":")
    if not separator or not port.isdigit() or "/" in target:
        return [target]
    addresses = set(chain(*addresses_of(target).values()))
    # localhost is one server with two addresses.
    return [target] if addresses <= {f"127.0.0.1:{port}", f"[::1]:{port}"} else sorted(addresses)
