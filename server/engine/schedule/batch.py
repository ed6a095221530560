"""Batches: which queued sequences run together, and what their run is expected to cost."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from attention_serving.server.engine.limits import UNLIMITED, Limits
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.session import RunControl

# A run that takes this many times its fixed cost does not accept sequences of other requests.
FULL_AT_FIXED_COSTS = 20
# A run that takes fewer times its fixed cost is not divided among free slots.
DIVIDED_AT_FIXED_COSTS = 4
# All threads compute one run if that is faster, and if all other work is at most this part of it.
OTHER_WORK_SHARE = 0.1
# A batch is complete once so many sequences would have cost more in it than on their own: others are farther.
MAX_REJECTED_CANDIDATES = 4


class Batch:
    """Sequences that run together on one graph.

    Attributes:
        model: The model of all sequences.
        graph: The graph that runs them.
        sequences: The oldest first.
        seconds: Expected duration of the run: as measured at the load until `close`, and then as runs take
            now.
        seconds_alone: Sum of the expected durations of a run for each sequence.
        run_bytes: Expected memory of the run, from `close` on.
        rows: Rows that are computed, padding included; from `close` on.
        is_parallel: Whether all threads compute the run.
        may_take_longer: Whether the run may take longer than expected.
        run_seconds: How long the run took; 0 before its end, and if it failed.
        control: Ends the run early; None if that is not worth it.
        number: Its place in the order in which batches start, from 1.
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
            max_seconds: Work (`seconds_alone`) that is left to this batch if others compute at the same time.
        """
        plan = head.plan
        self.model = head.request.model
        self.graph, self._lengths, self._query_rows = plan.graph, plan.lengths, plan.lengths[0]
        self._max_bytes = min(limits.max_batch_bytes, max_bytes)
        self._max_seconds = max_seconds
        self._max_sequences = 1 if plan.runs_alone else limits.max_batch_sequences
        self._max_rows = limits.max_batch_rows
        self.sequences = [head]
        self.seconds = self.seconds_alone = plan.seconds
        self.is_parallel = self.may_take_longer = self._is_alone = False
        self.run_bytes = self.rows = 0
        self.run_seconds = self._expected_seconds = 0.0
        self.control: RunControl | None = None
        self.number = 0
        self._fixed_seconds = plan.fixed_seconds

    def __iter__(self) -> Iterator[SequenceInputs]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_full(self) -> bool:
        """Whether no further sequence may join."""
        return len(self.sequences) >= self._max_sequences

    @property
    def is_closed(self) -> bool:
        """Whether no sequence of another request may join."""
        return self.is_full or self._takes(FULL_AT_FIXED_COSTS)

    def take_same_shape(self, bucket: deque[SequenceInputs], now: float) -> None:
        """Takes the first sequences of a bucket as long as they are like that of the batch, and fit.

        That is the usual case, in which requests of one sequence and one form follow each other: how many fit
        is found once for all of them.

        Args:
            bucket: Sequences that may join the batch, which has one.
            now: The current time.
        """
        sequences, plan = self.sequences, self.sequences[0].plan
        earliest = now + self.model.least_seconds(plan)
        for sequence in islice(bucket, max(0, self._max_identical_sequences() - 1)):
            request = sequence.request
            is_same = sequence.plan is plan or sequence.plan == plan  # two caches may have made them
            if not is_same or request.is_done or request.deadline < earliest or len(request.sequences) > 1:
                break
            sequences.append(sequence)
        for _ in range(len(sequences) - 1):
            bucket.popleft()
        self.seconds = self._fixed_seconds + len(sequences) * (plan.seconds - self._fixed_seconds)
        self.seconds_alone = len(sequences) * plan.seconds
        self._query_rows = len(sequences) * plan.lengths[0]

    def _max_identical_sequences(self) -> int:
        """How many sequences like the first may be in the batch, each of another request: see `_admits`."""
        plan, fixed = self.sequences[0].plan, self._fixed_seconds
        most = min(
            self._max_sequences, self._max_rows // plan.computed_rows, self._max_bytes // plan.run_bytes
        )
        if (marginal := plan.seconds - fixed) > 0:
            # One more may join while the run takes no more than so many times its fixed cost.
            full, divided = FULL_AT_FIXED_COSTS - 1, DIVIDED_AT_FIXED_COSTS - 1
            most = min(most, 1 + full * fixed // marginal)
            if self._max_seconds < math.inf:
                most = min(most, max(1 + divided * fixed // marginal, self._max_seconds // plan.seconds))
        return int(most)

    def add(self, sequence: SequenceInputs) -> None:
        """Adds a sequence of the same lengths as all others, which pads nothing, if the limits allow it."""
        count, plan = len(self.sequences) + 1, sequence.plan
        fits = count * plan.run_bytes <= self._max_bytes and count * plan.computed_rows <= self._max_rows
        if fits and self._admits(sequence):
            self.sequences.append(sequence)
            self._query_rows += sequence.lengths[0]
            self.seconds = self._fixed_seconds + count * (plan.seconds - self._fixed_seconds)
            self.seconds_alone += plan.seconds

    def add_padded(self, nearest: Iterable[SequenceInputs]) -> None:
        """Adds those of some sequences that save time, compared with runs of their own.

        Args:
            nearest: Sequences of other lengths, the nearest first.
        """
        if not self.model.supports_padding:
            return
        losses = 0
        for sequence in nearest:
            if losses == MAX_REJECTED_CANDIDATES or self.is_full:
                break
            if self._admits(sequence) and not self._pad(sequence):
                losses += 1

    def _pad(self, sequence: SequenceInputs) -> bool:
        """Adds a sequence of other lengths, unless that costs more than a run of its own."""
        lengths = tuple(map(max, self._lengths, sequence.lengths))
        query_rows = self._query_rows + sequence.lengths[0]
        # Once mixed, a batch keeps the graph that it needs for that.
        kind = self.model.mixed_graph(self.graph)
        size = self.model.run_size(kind, len(self.sequences) + 1, lengths, query_rows)
        seconds = self.model.seconds(kind, *size)
        if seconds > self.seconds + sequence.plan.seconds:
            return False
        if self._max_rows < UNLIMITED and self._rows(size) > self._max_rows:
            return False
        if self.model.run_bytes(kind, *size) > self._max_bytes:
            return False
        if kind is not self.graph:
            self.graph, self._fixed_seconds = kind, self.model.run_cost(kind).fixed
        self.sequences.append(sequence)
        self._lengths, self._query_rows, self.seconds = lengths, query_rows, seconds
        self.seconds_alone += sequence.plan.seconds
        return True

    def close(self, other_seconds: float) -> None:
        """Takes no further sequence, and is run on all threads if that is faster and nothing else needs them.

        Args:
            other_seconds: Other work that is queued or running.
        """
        model, plan = self.model, self.sequences[0].plan
        if len(self.sequences) == 1:
            self.run_bytes, self.rows = plan.run_bytes, plan.computed_rows
        else:
            size = model.run_size(self.graph, len(self.sequences), self._lengths, self._query_rows)
            self.run_bytes, self.rows = model.run_bytes(self.graph, *size), self._rows(size)
        # It waits its turn on a device, or pools spans.
        self.may_take_longer = not model.runs_on_host or (
            model.manifest.encoder is not None
            and any(sequence.spans is not None for sequence in self.sequences)
        )
        expected = self._expected_seconds = self.seconds
        self._is_alone = other_seconds <= OTHER_WORK_SHARE * expected
        pace = model.costs.paces[self.graph]
        self.is_parallel, self.seconds = pace.choose(expected, is_alone=self._is_alone)

    def record_duration(self) -> None:
        """Adjusts the pace of the model to this run, if it ran alone from beginning to end."""
        if self._is_alone and self.run_seconds:
            pace = self.model.costs.paces[self.graph]
            pace.observe(self._expected_seconds, self.run_seconds, parallel=self.is_parallel)

    def _admits(self, sequence: SequenceInputs) -> bool:
        """Whether the batch may become larger, and is not so long that the sequence should run in another."""
        if self.is_full or sequence.plan.runs_alone:
            return False
        if sequence.request is not self.sequences[0].request and self._takes(FULL_AT_FIXED_COSTS):
            return False
        exceeds_share = self.seconds_alone + sequence.plan.seconds > self._max_seconds
        return not (exceeds_share and self._takes(DIVIDED_AT_FIXED_COSTS))

    def _rows(self, size: tuple[int, tuple[int, ...]]) -> int:
        """Rows that a run of a size computes, padding included."""
        count, lengths = size
        return count * sum(self.model.rows(lengths))

    def _takes(self, fixed_costs: int) -> bool:
        """Whether the run takes more than this many times its fixed cost, which is then negligible."""
        return self.seconds > fixed_costs * self._fixed_seconds
