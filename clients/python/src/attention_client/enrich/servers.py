"""Computes on servers: one stream to each, all fed from one queue, so that who is faster gets more."""

import logging
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from attention_client._client import AttentionClient
from attention_client._models import ModelInfo
from attention_client._streaming import Outcome
from attention_client._values import AttendInputs, StreamItem, TextInputs, TokenInputs
from attention_client.enrich.backend import BackendRequest, BackendResult, ModelSpec, Role
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.errors import (
    AttentionClientError,
    CallCancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    ResourceExhaustedError,
    UnavailableError,
)

log = logging.getLogger(__name__)
# Requests on their way to one server.
IN_FLIGHT = 8
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
RETRY_SECONDS = 120.0
# How long to wait at most for a server before the job has begun.
START_SECONDS = 30.0
TRANSIENT = (UnavailableError, DeadlineExceededError, CallCancelledError, ResourceExhaustedError)
# Of a request that exhausts resources: this reason stays, any other says that the server is full now.
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
# How long a stream's reader may wait for a request before it looks whether the stream is over.
LOOK_SECONDS = 0.1
# gRPC's core ends a stream whose message is too large and does not say which: one of those under way.
MOST_ATTEMPTS = 3


@dataclass(slots=True, eq=False)
class Asked:
    """A request, the future of its answer, and how many streams ended with a message too large under it."""

    request: BackendRequest
    future: "Future[BackendResult]"
    attempts: int = 0


class ServerBackend:
    """One model on one or several servers.

    A request whose server goes away is sent again, to whichever is there first. Where none has answered for
    `retry_seconds`, the job ends.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        model: str,
        version: str = "",
        *,
        return_weights: bool = False,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Asks each server for the model.

        Args:
            targets: Servers as HOST:PORT. A name with several addresses stands for as many servers.
            model: Name of the model.
            version: Its version; empty for the highest of the first server.
            return_weights: Whether to return the attention weights too.
            retry_seconds: How long to try again while no server answers.

        Raises:
            EnrichError: A server is not there, lacks the model, or has another version of it.
        """
        if retry_seconds < 0:
            raise EnrichError(f"retry_seconds is {retry_seconds:g}; it cannot be below 0")
        targets = [targets] if isinstance(targets, str) else targets
        self._clients = [
            AttentionClient(address, max_retries=0, wait_for_ready=False)
            for target in targets
            for address in resolve(target)
        ]
        patience = min(retry_seconds, START_SECONDS)
        found = [_describe(client, model, version, patience) for client in self._clients]
        if versions := sorted({info.version for info in found} - {found[0].version}):
            others = ", ".join(versions)
            raise EnrichError(f"servers answer with version {found[0].version} and with {others}: name one")
        self.model = spec_of(found[0])
        self.concurrency = IN_FLIGHT * len(self._clients)
        self._return_weights = return_weights
        self._retry_seconds = retry_seconds
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._answered_at = time.monotonic()
        self._closing = threading.Event()
        self._failure: EnrichError | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(client,), name="enrich", daemon=True)
            for client in self._clients
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: BackendRequest) -> "Future[BackendResult]":
        """As of Backend."""
        asked = Asked(request, Future())
        self._answered_at = time.monotonic()  # there may have been nothing to answer for long
        self._asked.put(asked)
        self._fail_all()
        return asked.future

    def close(self) -> None:
        """Ends every stream."""
        self._closing.set()
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, client: AttentionClient) -> None:
        """Keeps a stream to one server, to the end of the job."""
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set() and not self._failure:
            sent = _Sent(self._asked, self._closing)
            try:
                for outcome in client.attend_stream(
                    self.model.name,
                    sent,
                    return_exceptions=True,
                    return_weights=self._return_weights,
                    max_in_flight=IN_FLIGHT,
                    version=self.model.version,
                ):
                    if self._settle(sent.answered(), outcome):
                        pause = FIRST_PAUSE_SECONDS
                    else:  # the server is full
                        pause = self._wait(pause)
                sent.requeue()
            except AttentionClientError as error:
                too_large = isinstance(error, MessageTooLargeError)
                sent.requeue(error if too_large else None)
                self._lost(error)
            pause = self._wait(pause)
        self._fail_all()

    def _wait(self, pause: float) -> float:
        """Waits before the next try and returns how long to wait before the one after it."""
        self._closing.wait(pause * random.uniform(0.5, 1))  # noqa: S311 - so that not all try at once
        return min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _settle(self, asked: Asked, outcome: Outcome) -> bool:
        """Resolves the future of an answered request; False where it has to be asked again."""
        if not isinstance(outcome, AttentionClientError):
            self._answered_at = time.monotonic()
            asked.future.set_result(BackendResult(outcome.context_vectors, outcome.attention_weights))
        elif isinstance(outcome, InvalidArgumentError) or outcome.reason == LIMIT_EXCEEDED:
            self._answered_at = time.monotonic()
            asked.future.set_exception(RefusedError(outcome.message, outcome.reason))
        elif isinstance(outcome, TRANSIENT):
            self._lost(outcome)
            self._asked.put(asked)
            return False
        else:
            asked.future.set_exception(EnrichError(f"{self.model.name}: {outcome.message}"))
        return True

    def _lost(self, error: AttentionClientError) -> None:
        """Notes that a server does not answer; where none has for long, the job cannot go on."""
        log.info("a server does not answer, trying again: %s", error)
        if not isinstance(error, TRANSIENT):
            self._failure = EnrichError(str(error))
        elif time.monotonic() - self._answered_at > self._retry_seconds:
            self._failure = EnrichError(
                f"no server has answered for {self._retry_seconds:g} s; last: {error}"
            )

    def _fail_all(self) -> None:
        """Where the job cannot go on, says so to all who wait."""
        while self._failure:
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return
            asked.future.set_exception(self._failure)


class _Sent(Iterator[StreamItem]):
    """What a stream takes from the queue, and what of that is not answered yet.

    The stream reads it on a thread of its own, which may be waiting here when the stream breaks.
    """

    def __init__(self, asked: "queue.SimpleQueue[Asked]", closing: threading.Event) -> None:
        self._asked = asked
        self._closing = closing
        self._lock = threading.Lock()
        self._unanswered: deque[Asked] | None = deque()

    def __next__(self) -> StreamItem:
        while not self._closing.is_set() and self._unanswered is not None:
            try:
                asked = self._asked.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            with self._lock:
                if self._unanswered is not None:
                    self._unanswered.append(asked)
                    return _item(asked.request)
            self._asked.put(asked)
        raise StopIteration

    def answered(self) -> Asked:
        """The oldest request, which was answered now."""
        with self._lock:
            assert self._unanswered is not None  # noqa: S101 - given back when the stream is over
            return self._unanswered.popleft()

    def requeue(self, too_large: AttentionClientError | None = None) -> None:
        """Puts what was not answered back into the queue; takes nothing more from it.

        Args:
            too_large: What ended the stream, where that was a message too large.
        """
        with self._lock:
            unanswered, self._unanswered = self._unanswered, None
        for asked in unanswered or ():
            asked.attempts += too_large is not None
            if too_large and asked.attempts >= MOST_ATTEMPTS:
                asked.future.set_exception(RefusedError(too_large.message, LIMIT_EXCEEDED))
            else:
                self._asked.put(asked)


def _item(request: BackendRequest) -> StreamItem:
    query = request.inputs[Role.QUERY]
    if isinstance(query[0], str):
        return TextInputs(list(query))
    if query[0].ndim == 1:
        return TokenInputs(list(query))
    return AttendInputs(*(list(rows) for rows in request.inputs.values()))


def resolve(target: str) -> list[str]:
    """Every address of a server's name, as HOST:PORT; a target that is no such thing is left as it is."""
    host, separator, port = target.rpartition(":")
    if not separator or not port.isdigit() or "/" in target:
        return [target]
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnrichError(f"{target}: {error.strerror or error}") from error
    addresses = {str(address[0]) for *_, address in found}
    # localhost stands for one server under two addresses.
    if addresses <= {"127.0.0.1", "::1"}:
        return [target]
    return sorted(f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in addresses)


def _describe(client: AttentionClient, model: str, version: str, patience: float) -> ModelInfo:
    try:
        client.wait_until_ready(patience)
        return client.model(model, version)
    except AttentionClientError as error:
        raise EnrichError(str(error)) from error


def spec_of(info: ModelInfo) -> ModelSpec:
    """What a job must know of a model, of what its server says.

    Raises:
        EnrichError: The model does not answer, or makes no vectors of sequences.
    """
    if info.state != "ready":
        raise EnrichError(f"model {info.name!r} does not answer: {info.state_reason}")
    return ModelSpec.from_axes(
        name=info.name,
        version=info.version,
        accepts_text=info.accepts_text,
        inputs=[tensor.axes for tensor in info.inputs if not tensor.optional],
        output=info.outputs[0].axes,
        parity_error=info.parity.measured_max_abs_error if info.parity else None,
    )
