"""A request that its model can answer, from its validation to its end."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.coroutines import Task
from attention_serving.server.engine.budget import ANYONE, Caller
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.events import Timeline
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule.fair_shares import CallerShare
from attention_serving.server.engine.types import Array, EncoderOutputs, HeadSelection, Result, SequencePlan

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False, slots=True)
class SequenceInputs:
    """One sequence of a validated request, and its place in the queue.

    Attributes:
        inputs: Arrays (T, ...) by input name.
        mask: Broadcasts to (H, Tq, Tk); None if every key may be attended to.
        plan: Its derived sizes.
        spans: First and exclusive last token (n, 2) of the parts whose embeddings are returned; None for one
            embedding of the sequence.
        head_selection: Which attention weights are returned; None for all.
        encoder_outputs: What is returned of the outputs of a text encoder; None for all as they are.
        kind: The kind of a text: see `server.engine.types.DecodedRequest.input_kind`.
        request: Its request, once that is queued.
        index: Its place in the request.
        start_tag: When it is its turn; see `server.engine.schedule.queue`.
    """

    inputs: Mapping[str, Array]
    mask: NDArray[np.bool_] | None
    plan: SequencePlan
    spans: Array | None = None
    head_selection: HeadSelection | None = None
    encoder_outputs: EncoderOutputs | None = None
    kind: str = ""
    request: "Request" = field(init=False)
    index: int = field(init=False)
    start_tag: float = field(init=False)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length by symbolic axis."""
        return self.plan.sizes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length on each of the model's axes."""
        return self.plan.lengths


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Plan:
    """What requests of equal lengths and options have in common. Does not keep its model alive.

    Attributes:
        graph: The graph that computes its sequences, of which long ones run in blocks.
        lengths: Rows of each sequence, for each of the model's inputs.
        sequences: The plan of each sequence.
        required_bytes: Memory that a request takes in addition: its masks at one byte for each flag, the
            result, and the serialized reply.
        dimensions: Number of leading elements of each embedding; 0 for all.
        normalises: Whether embeddings are normalised after the run.
        seconds: Sum of the expected durations of a run of each of its sequences alone.
        longest: The sequence whose run is expected to take longest.
    """

    graph: GraphKind
    lengths: tuple[tuple[int, ...], ...]
    sequences: tuple[SequencePlan, ...]
    required_bytes: int
    dimensions: int = 0
    normalises: bool = False
    seconds: float = field(init=False)
    longest: SequencePlan = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = sum([sequence.seconds for sequence in self.sequences])
        self.longest = max(self.sequences, key=attrgetter("seconds"))

    def make_request(
        self, model: LoadedModel, rows: Mapping[str, Array], deadline: float, caller: Caller
    ) -> "Request":
        """A request of this plan, without masks and spans.

        Args:
            model: The model that the plan was made for.
            rows: The rows (sum of lengths, ...) of each of the model's inputs, of its element types.
            deadline: On `time.monotonic`'s clock, in seconds.
            caller: Whose request it is.
        """
        if len(self.sequences) == 1:  # the usual case
            sequence = SequenceInputs(rows, None, self.sequences[0])
            return Request(self, model, (sequence,), deadline, caller)
        columns = [
            split(input_rows, lengths)
            for input_rows, lengths in zip(rows.values(), self.lengths, strict=True)
        ]
        parts = [
            SequenceInputs(dict(zip(rows, arrays, strict=True)), None, plan)
            for plan, *arrays in zip(self.sequences, *columns, strict=True)
        ]
        return Request(self, model, tuple(parts), deadline, caller)


def split(rows: Array, lengths: tuple[int, ...]) -> list[Array]:
    """One view (T, ...) of the rows of all sequences for each of them."""
    if len(lengths) == 1:
        return [rows]
    return [rows[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


class Request:
    """A request that its model can answer: the only type that may enter the queue. It ends once.

    Attributes:
        plan: What it has in common with others.
        model: Answers it.
        sequences: Its sequences; none once it has ended.
        deadline: On `time.monotonic`'s clock, in seconds.
        caller: Whose request it is.
        timeline: Receives the runs; None if the request is not recorded.
        is_prefix: Whether another request needs its result: see `server.engine.requests.shared_prefix`.
        prefix_seconds: How long that took before; 0 without a prefix.
        queued_at: When it was queued.
        number: Its place in the order of arrival.
        share: Its caller, among those in the queue.
        queued_seconds: Sum of the expected durations of its sequences that are in the queue.
        queued_sequences: Number of its sequences that are in the queue; of a request of one, at the start.
        unfinished_sequences: Number of sequences without a result.
        outputs: The outputs of each sequence by name; empty for those without a result.
        is_done: Whether it has ended or was withdrawn. Set by the queue, with the lock of the engine.
        outcome: The result or an error; None before, and if it was withdrawn.
    """

    # Of the class, so that a request is made quickly.
    timeline: Timeline | None = None
    is_prefix, prefix_seconds = False, 0.0
    is_done = False
    outcome: Result | EngineError | None = None
    queued_at: float
    number: int
    share: CallerShare
    queued_seconds: float
    queued_sequences: int
    unfinished_sequences: int
    outputs: list[Mapping[str, Array]]

    def __init__(
        self,
        plan: Plan,
        model: LoadedModel,
        sequences: tuple[SequenceInputs, ...],
        deadline: float,
        caller: Caller = ANYONE,
    ) -> None:
        self.plan, self.model, self.sequences = plan, model, sequences
        self.deadline, self.caller = deadline, caller
        self._waiting: list[Task] = []

    def wait(self, task: Task) -> None:
        """Wakes a task when there is an outcome, on any thread; at once if there is one. For one task."""
        self._waiting.append(task)
        if self.outcome is not None:
            self.end(self.outcome)

    def end(self, outcome: Result | EngineError | None) -> None:
        """Sets the outcome, or None if the request was withdrawn. For whoever released it from the queue."""
        self.sequences = ()  # they refer to the request
        self.outcome = outcome
        try:
            task = self._waiting.pop()  # one thread gets it
        except IndexError:
            return
        if outcome is None:
            return
        try:
            task.wake()
        except Exception:  # other requests must still end
            log.exception("callback failed")

    def take_result(self) -> Result:
        """Returns the result, once.

        Raises:
            EngineError: The request failed.
        """
        # An error refers to frames that refer to this request: neither may keep the other alive.
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, Result):
            return outcome
        if outcome is None:
            raise ValueError("the request has not ended, or its result was taken")
        try:
            raise outcome
        finally:
            del outcome
