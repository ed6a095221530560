"""What happens in a server: one event for each call, run and failed request; and what they add up to.

Events wait until somebody reads what they count, or until there are many. Whoever adds one does no more than
that. They hold names and numbers only, and keep neither a model nor tensors in memory. All moments are on
`time.monotonic`'s clock.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from attention_serving.server.engine.errors import EngineError

log = logging.getLogger(__name__)
# How many events wait at most.
MAX_EVENTS = 1024
# Identifies a request among the records of its owner, such as the context of a span.
Reference: TypeAlias = Any


class ExpiryStage(StrEnum):
    """Where a request was when its deadline passed."""

    QUEUED = "queued"
    """Before its run began."""
    RUNNING = "running"
    """After its run began."""


class CallEvent(NamedTuple):
    """gRPC has finished a call.

    Attributes:
        method: Full name of its method.
        code: Name of its status code.
        seconds: Time since it arrived.
    """

    method: str
    code: str
    seconds: float


class RefusalEvent(NamedTuple):
    """A call, or a message of a stream, was refused for a stable reason, such as OVERLOADED."""

    reason: str


@dataclass(eq=False, slots=True)
class RunEvent:
    """A run succeeded.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        precision: Precision of its weights, such as fp32.
        statistics: What the model has done.
        graph: The graph that ran.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        padding: Rows that were computed in addition.
        started_at: When the inputs began to be padded.
        prepared_at: When they were.
        computed_at: When the graph had run.
        ended_at: When the outputs were split.
        queued_at: For each sequence, when its request was queued.
        latencies: For each request that the run completed, the time since it was queued, in seconds.
        span_contexts: The references of its requests that have one.
        reference: What its first reader identifies it by; None until then.
    """

    model: str
    version: str
    precision: str
    statistics: "ModelStatistics"
    graph: str
    rows: int
    padding: int
    started_at: float
    prepared_at: float
    computed_at: float
    ended_at: float
    queued_at: list[float]
    latencies: list[float]
    span_contexts: list[Reference] = field(default_factory=list)
    reference: Reference | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences in the run."""
        return len(self.queued_at)

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return self.ended_at - self.started_at

    @property
    def queue_seconds(self) -> list[float]:
        """Time in the queue, for each sequence."""
        return [self.started_at - queued_at for queued_at in self.queued_at]

    @property
    def is_shared(self) -> bool:
        """Whether several of its requests have a reference."""
        return len(self.span_contexts) > 1


class FailureEvent(NamedTuple):
    """A request to a loaded model was refused, or ended without a result.

    Attributes:
        model: Name of the model.
        code: Name of the status code.
        statistics: What the model has done; None if the request was refused before it was queued.
        seconds: Time since it was queued.
        stage: Where it was, if its deadline had passed.
    """

    model: str
    code: str
    statistics: "ModelStatistics | None" = None
    seconds: float = 0.0
    stage: ExpiryStage | None = None


class TerminationEvent(NamedTuple):
    """A run of a model was stopped because no caller waited for its results any more."""

    model: str


Event: TypeAlias = CallEvent | RefusalEvent | RunEvent | FailureEvent | TerminationEvent


class EventLog:
    """The events that were not counted yet. Any thread may call its methods; each event is counted once."""

    def __init__(self, *counters: Callable[[Sequence[Event]], None]) -> None:
        """Begins without events.

        Args:
            counters: Each counts some events. If one fails, that is logged: it must not break what it counts.
        """
        self._counters = (_count_by_model, *counters)
        self._counting = threading.Lock()
        self._events: deque[Event] = deque()

    def add(self, event: Event) -> None:
        """Adds an event."""
        self._events.append(event)
        if len(self._events) > MAX_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Counts the events so far."""
        with self._counting:
            events = [self._events.popleft() for _ in range(len(self._events))]
            for count in self._counters:
                try:
                    count(events)
                except Exception:
                    log.exception("events not counted")


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The engine at one moment. Each attribute is the metric of the same name, after `attention_`.

    Attributes:
        queue_depth: Number of sequences that wait for a run.
        queue_age_seconds: How long the oldest of them has waited; 0 if there is none.
        predicted_queue_seconds: Expected duration of the runs of all queued sequences.
        in_flight_bytes: Memory that is reserved for requests.
        run_memory_bytes: Memory that is admitted for the runs under way.
        runs: Number of runs under way.
        context_bytes: Memory of stored contexts.
        context_hits: Requests that found their context, since the start.
        context_misses: Requests that did not.
        context_evictions: Contexts that made room for others.
        context_folder_errors: How often the folder of contexts could not be read or written.
    """

    queue_depth: int = 0
    queue_age_seconds: float = 0.0
    predicted_queue_seconds: float = 0.0
    in_flight_bytes: int = 0
    run_memory_bytes: int = 0
    runs: int = 0
    context_bytes: int = 0
    context_hits: int = 0
    context_misses: int = 0
    context_evictions: int = 0
    context_folder_errors: int = 0


@dataclass(slots=True)
class Durations:
    """How often something happened, and how long it took in total.

    Attributes:
        count: How often.
        seconds: Total duration.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a duration, or several by their sum."""
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class RunDurations:
    """How often runs of one number of sequences took place, and how long their parts took in total.

    Attributes:
        count: How often.
        prepare: Total seconds of padding and stacking the inputs.
        compute: Total seconds of the runs themselves.
        split: Total seconds of taking the outputs apart.
    """

    count: int = 0
    prepare: float = 0.0
    compute: float = 0.0
    split: float = 0.0

    def add(self, run: RunEvent) -> None:
        """Adds a run."""
        self.count += 1
        self.prepare += run.prepared_at - run.started_at
        self.compute += run.computed_at - run.prepared_at
        self.split += run.ended_at - run.computed_at


@dataclass
class ModelStatistics:
    """What a loaded model has done since it was loaded. Any thread may call its methods; see `lock`.

    Attributes:
        succeeded: Requests, from their arrival in the queue to their results.
        failed: Requests that were queued and have no result: refused by a run, expired or cancelled.
        queued: Sequences, from their arrival in the queue to their runs.
        runs: Parts of runs by their number of sequences.
        last_run: When the last run ended, in seconds since 1970; 0 before the first.
        lock: Held by whoever reads several attributes of one moment.
    """

    succeeded: Durations = field(default_factory=Durations)
    failed: Durations = field(default_factory=Durations)
    queued: Durations = field(default_factory=Durations)
    runs: defaultdict[int, RunDurations] = field(default_factory=lambda: defaultdict(RunDurations))
    last_run: float = 0.0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def add(self, event: RunEvent | FailureEvent) -> None:
        """Adds a run and the requests that it completed, or a request that has no result."""
        with self.lock:
            if isinstance(event, FailureEvent):
                self.failed.add(event.seconds)
                return
            self.last_run = time.time() - (time.monotonic() - event.ended_at)
            self.queued.add(sum(event.queue_seconds), event.sequences)
            self.succeeded.add(sum(event.latencies), len(event.latencies))
            self.runs[event.sequences].add(event)


def _count_by_model(events: Sequence[Event]) -> None:
    for event in events:
        if isinstance(event, RunEvent | FailureEvent) and event.statistics is not None:
            event.statistics.add(event)


class Timeline:
    """The stages of one request: a call of one request, or a message of a stream.

    Filled by one thread at a time, and read once the request has ended.

    Attributes:
        arrived_at: When its message had arrived.
        received_bytes: Size of the message.
        model: Name of the model; empty until it is found.
        version: Version of the model.
        sequences: Number of sequences; 0 until the request is validated.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        queued_at: When the request was queued; 0 if it was refused before.
        runs: The runs that computed its sequences.
        encode_started_at: When its reply began to be encoded; 0 if there was no result.
        encoded_at: When it was encoded.
        sent_bytes: Size of the reply.
        ended_at: When the reply of a stream's message was sent, or the call had ended; 0 before.
        code: What it ended with, such as OK.
        reason: The stable reason of an error; empty if there is none.
        span: OpenTelemetry's span of it, which is the call's unless the call is a stream; None if it is not
            sampled.
        reference: What the runs refer to the request by; None if they do not.
    """

    # Of the class, so that a timeline is made quickly.
    model = version = ""
    sequences = rows = 0
    queued_at = 0.0
    runs: tuple[RunEvent, ...] = ()
    reference: Reference | None = None
    encode_started_at = encoded_at = ended_at = 0.0
    sent_bytes = 0
    code, reason = "OK", ""
    span: Any = None

    def __init__(self, received_bytes: int = 0) -> None:
        self.arrived_at = time.monotonic()
        self.received_bytes = received_bytes

    @property
    def run_started_at(self) -> float:
        """When its first run began; 0 without a run."""
        if len(self.runs) == 1:  # of most requests
            return self.runs[0].started_at
        return min([run.started_at for run in self.runs], default=0.0)

    @property
    def run_ended_at(self) -> float:
        """When its last run ended; 0 without a run."""
        return max([run.ended_at for run in self.runs], default=0.0)

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """The stages that the request, which has ended, has reached: their names, beginnings and ends."""
        yield "decode", self.arrived_at, self.queued_at or self.ended_at
        if self.queued_at:
            yield "queue", self.queued_at, self.run_started_at or self.ended_at
        if self.runs:
            yield "run", self.run_started_at, self.run_ended_at
        if self.encoded_at:
            yield "encode", self.encode_started_at, self.encoded_at

    def fail(self, error: BaseException) -> None:
        """Notes what the request failed with."""
        engine_error = error if isinstance(error, EngineError) else EngineError("")
        self.code, self.reason = engine_error.code.name, engine_error.reason
