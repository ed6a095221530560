"""Batches: which queued sequences run together, and what their run is expected to cost."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.execute import Outputs, gather
from attention_serving.server.engine.fair_shares import CallerShare
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.outputs import shortened
from attention_serving.server.engine.types import Result
from attention_serving.server.engine.validation import ValidatedRequest

# A run that takes this many times its fixed cost does not accept sequences of other requests.
FULL_AT_CALL_COSTS = 20
# A run that takes fewer times its fixed cost is not divided among free slots.
DIVIDED_AT_CALL_COSTS = 4
# All threads compute one run if that is faster, and if all other work is at most this part of it.
OTHER_WORK_SHARE = 0.1
# A batch is complete once so many sequences would have cost more in it than on their own: others are farther.
MOST_LOSSES = 4


class Extent(NamedTuple):
    """How far a batch goes; see the attributes of `Batch`."""

    size: int
    graph: GraphKind
    lengths: tuple[int, int]
    seconds: float
    seconds_alone: float


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A queued request and the results that it has so far.

    Attributes:
        number: Place in the order of arrival, of its first sequence.
        queued_at: When it was queued, in seconds on the clock of the caller of the queue.
        missing: Number of sequences without a result.
        started: Whether one of its sequences is part of a batch.
        longest_seconds: Longest expected duration of a run of one of its sequences alone.
        least_seconds: The same if each run has all threads.
        queued_seconds: Sum of these durations for the sequences in the queue.
        share: The caller of the request, among those in the queue.
    """

    request: ValidatedRequest
    number: int
    queued_at: float
    share: CallerShare
    results: list[Outputs] = field(init=False)
    missing: int = field(init=False)
    started: bool = field(init=False, default=False)
    longest_seconds: float = field(init=False, default=0.0)
    least_seconds: float = field(init=False)
    queued_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        sequences = self.request.sequences
        self.missing = len(sequences)
        self.least_seconds = max([sequence.shape.least_seconds for sequence in sequences])
        self.results = [{}] * self.missing

    def deliver(self, index: int, outputs: Outputs) -> bool:
        """Stores the outputs of one sequence; returns whether the request is complete."""
        self.results[index] = outputs
        self.missing -= 1
        return not self.missing

    def resolve(self) -> None:
        """Resolves the request's future with its results."""
        outputs = gather(self.results)
        if self.request.dimensions:
            outputs = shortened(outputs, self.request.model, self.request.dimensions)
        result = Result(outputs)
        with suppress(InvalidStateError):  # cancelled during the run
            self.request.future.set_result(result)


class QueuedSequence:
    """One sequence in the queue.

    Attributes:
        number: Place in the order of arrival.
        lengths: Query and key length.
        graph: The graph that runs this sequence alone.
        seconds: Expected duration of a run of this sequence alone.
        run_bytes: Expected memory of that run.
        turn: When it is its turn; see `server.engine.batch_queue`.
    """

    __slots__ = (
        "graph",
        "index",
        "inputs",
        "lengths",
        "number",
        "pending",
        "request",
        "run_bytes",
        "seconds",
        "turn",
    )

    def __init__(self, pending: PendingRequest, index: int, number: int) -> None:
        self.pending = pending
        self.request = pending.request
        self.index = index
        self.number = number
        self.turn = 0.0
        self.inputs = self.request.sequences[index]
        _, self.lengths, self.graph, self.seconds, self.run_bytes, _, _ = self.inputs.shape


class Batch:
    """Sequences that run together on one graph.

    Attributes:
        model: The model of all sequences.
        graph: The graph that runs them.
        sequences: The oldest first.
        seconds: Expected duration of the run.
        seconds_alone: Sum of the expected durations of a run for each sequence.
        is_parallel: Whether all threads compute the run.
    """

    def __init__(
        self,
        limits: Limits,
        head: QueuedSequence,
        max_bytes: float = math.inf,
        max_seconds: float = math.inf,
    ) -> None:
        """Begins a batch with its oldest sequence.

        Args:
            limits: Bounds of a batch of several sequences.
            head: The oldest sequence.
            max_bytes: Memory that the run may take if further sequences join.
            max_seconds: Work (`seconds_alone`) that is left to this batch if others run beside it.
        """
        self._limits = limits
        self._max_bytes = min(limits.max_batch_bytes, max_bytes)
        self._max_seconds = max_seconds
        self._lengths = head.lengths
        self.model = head.request.model
        self.graph = head.graph
        self._runs_alone = self.model.runs_alone or head.inputs.is_in_blocks
        self.sequences = [head]
        head.pending.started = True
        self.seconds = self.seconds_alone = head.seconds
        self.is_parallel = False
        self._call_seconds = self.model.cost(self.graph).call

    def __iter__(self) -> Iterator[QueuedSequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def run_bytes(self) -> int:
        """Expected memory of the run."""
        return self.model.run_bytes(self.graph, len(self.sequences), *self._lengths)

    @property
    def is_full(self) -> bool:
        """Whether no further sequence may join."""
        return self._runs_alone or len(self.sequences) >= self._limits.max_batch_sequences

    @property
    def is_closed(self) -> bool:
        """Whether no sequence of another request may join."""
        return self.is_full or self._takes(FULL_AT_CALL_COSTS)

    @property
    def has_spans(self) -> bool:
        """Whether spans are pooled after the run, which the expected durations do not include."""
        return any(queued.inputs.spans is not None for queued in self.sequences)

    @property
    def is_abandoned(self) -> bool:
        """Whether no caller waits for a result of the batch any more."""
        return all(queued.request.future.done() for queued in self.sequences)

    def add(self, sequence: QueuedSequence) -> bool:
        """Adds a sequence of the same lengths as all others, which pads nothing, if the limits allow it."""
        if not self._admits(sequence):
            return False
        count = len(self.sequences) + 1
        if self.graph is sequence.graph:  # the usual case: the costs are those of the sequence, repeated
            run_bytes = count * sequence.run_bytes
            seconds = self._call_seconds + count * (sequence.seconds - self._call_seconds)
        else:
            run_bytes = self.model.run_bytes(self.graph, count, *self._lengths)
            seconds = self.model.seconds(self.graph, count, *self._lengths)
        if run_bytes > self._max_bytes:
            return False
        sequence.pending.started = True
        self.sequences.append(sequence)
        self.seconds = seconds
        self.seconds_alone += sequence.seconds
        return True

    def mix(self, nearest: Iterable[QueuedSequence]) -> None:
        """Adds those of some sequences that save the most time, compared with runs of their own.

        The first one may have to pay for the graph that takes unequal lengths, and costs more than it saves:
        several together are worth it.

        Args:
            nearest: Sequences of other lengths, the nearest first.
        """
        if not self.model.mixes_lengths:
            return
        saved = most = 0.0
        best, losses = self._extent, 0
        for sequence in nearest:
            if losses == MOST_LOSSES or self.is_full:
                break
            if not self._admits(sequence):
                continue
            gain = self._pad(sequence)
            if gain is None:
                losses += 1
                continue
            saved += gain
            if saved >= most:
                most, best = saved, self._extent
        self._extent = best
        for sequence in self.sequences:
            sequence.pending.started = True

    def _pad(self, sequence: QueuedSequence) -> float | None:
        """Adds a sequence and pads all to the longest, unless that costs more than a run of its own.

        Returns:
            The seconds that are saved, negative if the batch now needs the graph that takes unequal lengths;
            None if the sequence was not added.
        """
        own, count = sequence.lengths, len(self.sequences) + 1
        lengths = (max(self._lengths[0], own[0]), max(self._lengths[1], own[1]))
        # Once mixed, a batch keeps the graph that it needs for that.
        graph = self.model.batch_graph(self.graph, equal_lengths=False)
        seconds = self.model.seconds(graph, count, *lengths)
        gain = self.seconds + sequence.seconds - seconds
        if gain < 0 and graph is self.graph:
            return None
        if self.model.run_bytes(graph, count, *lengths) > self._max_bytes:
            return None
        self.sequences.append(sequence)
        self._extent = Extent(count, graph, lengths, seconds, self.seconds_alone + sequence.seconds)
        return gain

    @property
    def _extent(self) -> Extent:
        return Extent(len(self.sequences), self.graph, self._lengths, self.seconds, self.seconds_alone)

    @_extent.setter
    def _extent(self, extent: Extent) -> None:
        del self.sequences[extent.size :]
        if extent.graph is not self.graph:
            self._call_seconds = self.model.cost(extent.graph).call
        _, self.graph, self._lengths, self.seconds, self.seconds_alone = extent

    def choose_threads(self, other_seconds: float) -> None:
        """Runs the batch on all threads if it gains by that and nobody else needs them.

        Args:
            other_seconds: Work that is queued or running beside the batch.
        """
        if other_seconds > OTHER_WORK_SHARE * self.seconds:
            return
        seconds = self.model.parallel_seconds(self.graph, len(self.sequences), *self._lengths)
        if seconds < self.seconds:
            self.is_parallel, self.seconds = True, seconds

    def _admits(self, sequence: QueuedSequence) -> bool:
        """Whether the batch may become larger, and is not so long that the sequence should run in another."""
        if self.is_full or sequence.graph is not sequence.request.graph:  # in blocks, and therefore alone
            return False
        if sequence.request is not self.sequences[0].request and self._takes(FULL_AT_CALL_COSTS):
            return False
        exceeds_share = self.seconds_alone + sequence.seconds > self._max_seconds
        return not (exceeds_share and self._takes(DIVIDED_AT_CALL_COSTS))

    def _takes(self, call_costs: int) -> bool:
        """Whether the run takes more than this many times its fixed cost, which is then negligible."""
        return self.seconds > call_costs * self._call_seconds
