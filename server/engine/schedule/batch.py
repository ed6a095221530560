"""Batches: which queued sequences run together, and what their run is expected to cost."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.requests.validated_request import SequenceInputs

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
        head: SequenceInputs,
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
        self.graph = head.shape.graph
        self._runs_alone = self.model.runs_alone or head.is_in_blocks
        self.sequences = [head]
        head.request.started = True
        self.seconds = self.seconds_alone = head.shape.seconds
        self.is_parallel = False
        self._call_seconds = self.model.cost(self.graph).call

    def __iter__(self) -> Iterator[SequenceInputs]:
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
        return any(queued.spans is not None for queued in self.sequences)

    @property
    def is_abandoned(self) -> bool:
        """Whether no caller waits for a result of the batch any more."""
        return all(queued.request.is_done for queued in self.sequences)

    def take_alike(self, bucket: deque[SequenceInputs], now: float) -> None:
        """Takes the first sequences of a bucket as long as they are like that of the batch, and fit.

        That is the usual case, in which requests of one sequence and one form follow each other: how many fit
        is found once for all of them.

        Args:
            bucket: Sequences that may join the batch, which has one.
            now: The current time.
        """
        if not bucket:
            return
        head, taken, room = self.sequences[0], self.sequences, self._room_alike()
        while room and bucket:
            queued = bucket[0]
            request = queued.request
            is_late = now + request.form.least_seconds > request.deadline
            if queued.shape is not head.shape or len(request.sequences) > 1 or request.is_done or is_late:
                break
            taken.append(bucket.popleft())
            request.started = True
            room -= 1
        self.seconds = self._call_seconds + len(taken) * (head.shape.seconds - self._call_seconds)
        self.seconds_alone = len(taken) * head.shape.seconds

    def _room_alike(self) -> int:
        """How many sequences like that of the batch may join, each of a request of its own."""
        if self._runs_alone:
            return 0
        shape, call, count = self.sequences[0].shape, self._call_seconds, 1
        most = min(self._limits.max_batch_sequences, int(self._max_bytes // shape.run_bytes))
        while count < most:
            seconds = call + count * (shape.seconds - call)
            exceeds_share = (count + 1) * shape.seconds > self._max_seconds
            if seconds > (DIVIDED_AT_CALL_COSTS if exceeds_share else FULL_AT_CALL_COSTS) * call:
                break
            count += 1
        return count - 1

    def add(self, sequence: SequenceInputs) -> bool:
        """Adds a sequence of the same lengths as all others, which pads nothing, if the limits allow it."""
        if not self._admits(sequence):
            return False
        count = len(self.sequences) + 1
        if self.graph is sequence.shape.graph:  # the usual case: costs are repeated
            run_bytes = count * sequence.shape.run_bytes
            seconds = self._call_seconds + count * (sequence.shape.seconds - self._call_seconds)
        else:
            run_bytes = self.model.run_bytes(self.graph, count, *self._lengths)
            seconds = self.model.seconds(self.graph, count, *self._lengths)
        if run_bytes > self._max_bytes:
            return False
        sequence.request.started = True
        self.sequences.append(sequence)
        self.seconds = seconds
        self.seconds_alone += sequence.shape.seconds
        return True

    def mix(self, nearest: Iterable[SequenceInputs]) -> None:
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
            sequence.request.started = True

    def _pad(self, sequence: SequenceInputs) -> float | None:
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
        gain = self.seconds + sequence.shape.seconds - seconds
        if gain < 0 and graph is self.graph:
            return None
        if self.model.run_bytes(graph, count, *lengths) > self._max_bytes:
            return None
        self.sequences.append(sequence)
        self._extent = Extent(count, graph, lengths, seconds, self.seconds_alone + sequence.shape.seconds)
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

    def _admits(self, sequence: SequenceInputs) -> bool:
        """Whether the batch may become larger, and is not so long that the sequence should run in another."""
        if self.is_full or sequence.shape.graph is not sequence.request.form.graph:  # in blocks: alone
            return False
        if sequence.request is not self.sequences[0].request and self._takes(FULL_AT_CALL_COSTS):
            return False
        exceeds_share = self.seconds_alone + sequence.shape.seconds > self._max_seconds
        return not (exceeds_share and self._takes(DIVIDED_AT_CALL_COSTS))

    def _takes(self, call_costs: int) -> bool:
        """Whether the run takes more than this many times its fixed cost, which is then negligible."""
        return self.seconds > call_costs * self._call_seconds
