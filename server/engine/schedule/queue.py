"""The queue of validated requests: what runs next, and when. Has no thread, lock or clock of its own.

Sequences run in the order of their start tags. That of a request's first sequence is the present one, and
that of each further sequence is later by the expected duration of those before it. Requests of one sequence
therefore run in the order of their arrival, and a request of thousands shares the runs with the others
instead of stopping them. Source: start-time fair queueing, Goyal, Vin and Cheng 1996.

This is the order among the requests of one caller. If several callers have queued sequences, they take turns
by what each of them has run: see `server.engine.schedule.fair_shares`.

The sequence that is next is part of every batch, and waits until its run fits into the memory that is
left. Others join its batch if that is expected to cost less than a run of their own.

Runs start on the engine's threads, or inline on the one thread that calls `next_inline`. While a slot is
free and a batch may run, a thread is responsible for the queue: the inline thread if it is about to ask, or
asks after a short run, and otherwise the engine's threads (`needs_thread`).
"""

import math
from bisect import bisect_right
from collections import deque
from enum import Enum, auto
from heapq import merge
from itertools import chain, groupby, islice
from operator import attrgetter, sub

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.budget import ANYONE, Caller
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Request, SequenceInputs
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.fair_shares import CallerShare, FairShares

# How many sequences behind the oldest are considered for its batch.
LOOK_AHEAD = 256
# How much longer an inline run may take if nothing else runs or is queued.
IDLE_FACTOR = 10
# How long the engine must have been busy for a measurement, in seconds.
WINDOW_SECONDS = 0.2
# Weight of a new measurement compared with the earlier ones.
WEIGHT = 0.3
# A request must be expected to end this share of its remaining time before its deadline, because the
# transport needs time as well.
RESERVE = 0.1
# The share for a call whose message has not been received. It is larger, so that what is received is rarely
# refused afterwards: to receive a message costs more than to refuse the call.
EARLY_RESERVE = 0.3
# A request is admitted without a closer look if all work takes no more than this share of its remaining time.
FAST_PATH_FRACTION = 0.25
# The advised time before a retry is a multiple of this, in seconds.
RETRY_STEP_SECONDS = 0.05
# Sequences of one bucket run on the same graph of the same model, and are of the same caller. They are in the
# order of their start tags.
BucketKey = tuple[LoadedModel, GraphKind, CallerShare]
Bucket = deque[SequenceInputs]
# A batch, or None if none may start; and the requests that cannot be answered in time.
Next = tuple[Batch | None, list[Request]]
_start_tag, _share = attrgetter("start_tag"), attrgetter("request.share")
_seconds = attrgetter("plan.seconds")


class Dispatcher(Enum):
    """Who starts the next batch, if a slot is free."""

    INLINE = auto()
    """The inline thread, which asks at once or after a short run, and need not be woken."""
    ENGINE = auto()
    """A thread of the engine, which must be woken, until the inline thread asks again or submits."""
    ENGINE_UNTIL_EMPTY = auto()
    """A thread of the engine until the queue is empty, whatever the inline thread submits meanwhile: another
    thread has submitted too, memory has become free, or the queue was closed."""
    AFTER_RUN = auto()
    """Nobody until a run ends or a request leaves: the runs in progress leave too little memory."""


class LatencyEstimator:
    """Predicts when a request would be answered, so that one that would be late is refused at once.

    Costs of runs are measured on an idle machine, each run alone. Under load, runs share the cores with each
    other and with the transport, and batches save time. How much expected work is completed per second is
    therefore measured all the time. Work is measured in seconds that runs are expected to take alone.

    Attributes:
        rate: Work that is completed per second.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self._busy_since: float | None = None
        self._completed = 0.0

    def record_start(self, now: float) -> None:
        """Records that a batch starts."""
        if self._busy_since is None:
            self._busy_since, self._completed = now, 0.0

    def record_end(self, work: float, now: float, *, busy: bool) -> None:
        """Records that a batch ended.

        Args:
            work: Its work.
            now: The current time.
            busy: Whether other work is running or queued.
        """
        self._completed += work
        if self._busy_since is not None and (elapsed := now - self._busy_since) >= WINDOW_SECONDS:
            self.rate += WEIGHT * (self._completed / elapsed - self.rate)
            self._busy_since, self._completed = now, 0.0
        if not busy:
            self._busy_since = None

    def seconds(self, work: float) -> float:
        """How long that much work is expected to take."""
        return work / self.rate

    def check(
        self, waiting: float, request_seconds: float, deadline: float, now: float, *, reserve: float = RESERVE
    ) -> None:
        """Refuses a request that would be late.

        Args:
            waiting: Work that is done first: what is running and queued.
            request_seconds: Work of the request.
            deadline: When the caller stops waiting. Requests whose deadline has passed are not checked: they
                expire in the queue.
            now: The current time.
            reserve: Share of the remaining time that must be left.

        Raises:
            OverloadedError: The result would be too late. Not raised if nothing is waiting: then the
                attempt delays no other.
        """
        remaining = deadline - now
        if remaining == math.inf or remaining <= 0 or not waiting:
            return
        expected = self.seconds(waiting + request_seconds)
        late = expected - remaining * (1 - reserve)
        if late > 0:
            raise OverloadedError(
                f"the result is expected in {expected:.2f} s, which is too late for the "
                f"deadline in {remaining:.2f} s; try again later",
                retry_after=math.ceil(late / RETRY_STEP_SECONDS) * RETRY_STEP_SECONDS,
            )


class Queue:
    """Queued sequences, in buckets of those that may run together, and the slots that their batches run in.

    Attributes:
        running: Batches that have started or were handed over to the engine's threads, and the expected
            memory of each, in bytes.
        latency: Decides which requests would be late.
    """

    def __init__(self, limits: Limits, run_slots: int = 1, computing_runs: int = 0) -> None:
        """Creates an empty queue.

        Args:
            limits: Bounds of batches and of the memory of runs.
            run_slots: Number of batches that may run at a time.
            computing_runs: How many of them compute at a time, among which work is divided; 0 for all.
        """
        self.running: dict[Batch, int] = {}
        self.latency = LatencyEstimator()
        self._limits = limits
        self._run_slots, self._computing_runs = run_slots, computing_runs or run_slots
        # Sums of the expected durations of a run for each sequence.
        self._queued_seconds = self._running_seconds = 0.0
        self._buckets: dict[BucketKey, Bucket] = {}
        self._shares = FairShares()
        self._requests: set[Request] = set()
        # Those of several sequences.
        self._bulk: set[Request] = set()
        # Numbers of requests and of batches.
        self._next_number = self._started = 0
        self._handed_over: deque[Batch] = deque()
        self._dispatcher = Dispatcher.ENGINE
        self._closing = False

    def __bool__(self) -> bool:
        return bool(self._buckets)

    @property
    def sequences(self) -> int:
        """Number of queued sequences."""
        return sum(map(len, self._buckets.values()))

    @property
    def work(self) -> float:
        """Sum of the expected durations of a run for each queued and each running sequence."""
        return self._queued_seconds + self._running_seconds

    @property
    def oldest(self) -> float | None:
        """When the sequence that has waited longest was queued; None if the queue is empty."""
        # In a bucket, requests of one sequence come in the order of their arrival.
        requests = [bucket[0].request for bucket in self._buckets.values()]
        requests += [request for request in self._bulk if request.queued_sequences]
        return min((request.queued_at for request in requests), default=None)

    @property
    def needs_thread(self) -> bool:
        """Whether one of the engine's threads must call `next`."""
        if self._handed_over:
            return True
        if not self._buckets:
            return self._closing and not self.running
        return (
            self._dispatcher in (Dispatcher.ENGINE, Dispatcher.ENGINE_UNTIL_EMPTY)
            and len(self.running) < self._run_slots
        )

    @property
    def is_complete(self) -> bool:
        """Whether the queue was closed and everything has run."""
        return self._closing and not self._buckets and not self.running

    def deadline_is_far(self, deadline: float, now: float) -> bool:
        """Whether all work is small compared with the time until a deadline: then `check` is not needed."""
        work = self._queued_seconds + self._running_seconds
        return work / self.latency.rate <= FAST_PATH_FRACTION * (deadline - now)

    def check(self, deadline: float, now: float, caller: Caller, request_seconds: float = 0.0) -> None:
        """Refuses a request of a caller that would be late.

        Args:
            deadline: When the caller stops waiting.
            now: The current time.
            caller: Whose request it is.
            request_seconds: Expected duration of its runs; 0 before its message is received.

        Raises:
            OverloadedError: The result would be too late.
        """
        reserve = RESERVE if request_seconds else EARLY_RESERVE
        self.latency.check(
            self.work_before(request_seconds, caller), request_seconds, deadline, now, reserve=reserve
        )

    def work_before(self, request_seconds: float, caller: Caller = ANYONE) -> float:
        """Expected duration of the runs that come before the end of a request that is queued now.

        Args:
            request_seconds: Expected duration of the request's runs. A request of several sequences runs no
                more than this, and one sequence, before it.
            caller: Whose request it is. Another caller runs no more before it than its share.
        """
        later = [
            request.queued_seconds - request.plan.longest.seconds - request_seconds
            for request in self._bulk
            if request.caller == caller
        ]
        queued_seconds = self._shares.seconds_of(caller) - sum(more for more in later if more > 0)
        of_caller = max(0.0, queued_seconds)
        before = self._shares.seconds_before(caller, of_caller + request_seconds)
        return of_caller + before + self._running_seconds

    def add(self, request: Request, now: float, *, inline: bool = False) -> None:
        """Queues a request.

        Args:
            request: The request.
            now: The current time.
            inline: Whether the caller calls `next_inline` next.
        """
        sequences, kind, seconds = request.sequences, request.plan.graph, request.plan.seconds
        share = request.share = self._shares.of(request.caller)
        request.queued_at, request.number, request.queued_seconds = now, self._next_number, seconds
        self._next_number += 1
        request.unfinished_sequences = request.queued_sequences = count = len(sequences)
        request.outputs = [{}] * count
        start_tag = share.start_tag
        for index, sequence in enumerate(sequences):
            sequence.request, sequence.index, sequence.start_tag = request, index, start_tag
            start_tag += sequence.plan.seconds
        self._requests.add(request)
        if count > 1:
            self._bulk.add(request)
        key, was_empty = (request.model, kind, share), not self._buckets
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = deque(sequences)
        elif bucket[-1].start_tag <= share.start_tag:  # the usual case
            bucket.extend(sequences)
        elif count == 1:  # after those with the same start tag
            bucket.insert(bisect_right(bucket, share.start_tag, key=_start_tag), sequences[0])
        else:
            self._buckets[key] = deque(merge(bucket, sequences, key=_start_tag))
        self._queued_seconds += seconds
        share.sequences += count
        share.seconds += seconds
        is_asked = self._dispatcher in (Dispatcher.ENGINE_UNTIL_EMPTY, Dispatcher.AFTER_RUN) and not was_empty
        is_of_engine = is_asked or not inline or self._closing
        self._dispatcher = Dispatcher.ENGINE_UNTIL_EMPTY if is_of_engine else Dispatcher.INLINE

    def release(self, request: Request) -> bool:
        """Removes a request that has its result or was given up; returns whether it had not ended before."""
        if request.is_done:
            return False
        request.is_done = True
        self._requests.discard(request)
        if request.unfinished_sequences:
            self._remove(request)
        if self._bulk:
            self._bulk.discard(request)
        return True

    def has_started(self, request: Request) -> bool:
        """Whether one of its sequences runs, or has run."""
        return request.unfinished_sequences < len(request.sequences) or any(
            sequence.request is request for batch in self.running for sequence in batch
        )

    def _remove(self, request: Request) -> None:
        if self._dispatcher is Dispatcher.AFTER_RUN:  # the sequence that did not fit may be gone
            self._dispatcher = Dispatcher.ENGINE_UNTIL_EMPTY
        key = (request.model, request.plan.graph, request.share)
        bucket = self._buckets.pop(key, ())
        kept = deque(sequence for sequence in bucket if sequence.request is not request)
        if kept:
            self._buckets[key] = kept
        self._subtract([sequence for sequence in bucket if sequence.request is request])

    def clear(self) -> list[Request]:
        """Takes every sequence out of the queue; returns the requests, which are yet to be released."""
        self._bulk.clear()
        self._buckets.clear()
        self._shares = FairShares()
        self._queued_seconds = 0.0
        return list(self._requests)

    def close(self) -> None:
        """Leaves the rest of the queue to the engine's threads."""
        self._closing, self._dispatcher = True, Dispatcher.ENGINE_UNTIL_EMPTY

    def next(self, now: float) -> Next:
        """Takes a batch to run on one of the engine's threads."""
        if self._handed_over:
            return self._handed_over.popleft(), []
        if not self.needs_thread:
            return None, []
        return self._take(now)

    def next_inline(self, now: float, limit_seconds: float) -> Next:
        """Takes a batch to run on the inline thread, which then asks again.

        A batch that is expected to take longer than the limit, or that may, is handed over to the engine's
        threads. If nothing else runs or is queued, the limit is ten times as large.
        """
        if self._dispatcher is Dispatcher.INLINE:
            self._dispatcher = Dispatcher.ENGINE
        if not self._buckets or len(self.running) >= self._run_slots:
            return None, []
        batch, expired = self._take(now)
        if batch is None:
            return None, expired
        is_idle = not self._buckets and len(self.running) == 1
        if batch.seconds > limit_seconds * (IDLE_FACTOR if is_idle else 1) or batch.may_take_longer:
            self._handed_over.append(batch)
            return None, expired
        if self._dispatcher is Dispatcher.ENGINE:
            self._dispatcher = Dispatcher.INLINE
        return batch, expired

    def end_batch(self, batch: Batch, now: float) -> None:
        """Frees the slot and the memory of a batch."""
        del self.running[batch]
        # Rounding errors do not add up.
        self._running_seconds = self._running_seconds - batch.seconds_alone if self.running else 0.0
        if self._dispatcher is Dispatcher.AFTER_RUN:
            self._dispatcher = Dispatcher.ENGINE_UNTIL_EMPTY
        self.latency.record_end(batch.seconds_alone, now, busy=bool(self.running or self._buckets))
        if not self.running and batch.number == self._started:
            batch.record_duration()

    def _take(self, now: float) -> Next:
        """Takes the batch of the first sequence that still needs its result and can get it in time."""
        # If nothing runs, a run may start even if its estimate exceeds the limit.
        free_bytes = self._limits.max_run_bytes - sum(self.running.values()) if self.running else math.inf
        batch: Batch | None = None
        expired: list[Request] = []
        while self._buckets and batch is None:
            bucket = self._next_bucket()
            if bucket[0].plan.run_bytes > free_bytes:
                break
            head = bucket.popleft()
            share, unwanted = head.request.share, [head]
            if _is_wanted(head, now, expired):
                share.start_tag = max(share.start_tag, head.start_tag)
                self._shares.virtual_time = max(self._shares.virtual_time, share.virtual_time)
                idle = self._computing_runs - len(self.running)
                slot_share_seconds = self._queued_seconds / idle if idle > 1 else math.inf
                batch = Batch(self._limits, head, free_bytes, slot_share_seconds)
                alone = not bucket and len(self._buckets) == 1  # the usual case
                unwanted = [] if alone else self._fill(batch, bucket, now, expired)
            if not bucket:
                del self._buckets[head.request.model, head.request.plan.graph, share]
            if unwanted:
                self._subtract(unwanted)
        if batch is not None:
            self._subtract(batch.sequences, charge=True)
            batch.close(self._queued_seconds + self._running_seconds)
            self._started += 1
            batch.number = self._started
            self.running[batch] = batch.run_bytes
            self._running_seconds += batch.seconds_alone
            self.latency.record_start(now)
        if batch is None and self._buckets:
            self._dispatcher = Dispatcher.AFTER_RUN
        elif self._dispatcher is Dispatcher.AFTER_RUN:
            self._dispatcher = Dispatcher.ENGINE_UNTIL_EMPTY
        return batch, expired

    def _next_bucket(self) -> Bucket:
        if len(self._buckets) == 1:  # the usual case
            return next(iter(self._buckets.values()))
        return min(self._buckets.values(), key=_first)

    def _fill(self, batch: Batch, bucket: Bucket, now: float, expired: list[Request]) -> list[SequenceInputs]:
        """Lets sequences join a batch that gain by that, nearest in length first.

        Args:
            batch: Has its first sequence, and takes others out of the queue.
            bucket: Where the first one was. It may become empty; other empty buckets are removed.
            now: The current time.
            expired: Requests that cannot be answered in time are added.

        Returns:
            Further sequences that were taken out of the queue, whose results are not needed.
        """
        head = batch.sequences[0]
        request = head.request
        is_one = len(request.sequences) == 1
        if is_one and bucket:
            batch.take_same_shape(bucket, now)
        if not bucket and len(self._buckets) == 1:
            return []
        if batch.is_full or (batch.is_closed and is_one):
            return []
        # Those of all callers, in the order in which they are next.
        batch_key = request.model, request.plan.graph
        buckets = [queue for key, queue in self._buckets.items() if queue and key[:2] == batch_key]
        buckets.sort(key=_first)
        unwanted = _join(batch, buckets, now, expired)
        for emptied in [key for key, queue in self._buckets.items() if not queue and queue is not bucket]:
            del self._buckets[emptied]
        return unwanted

    def _subtract(self, sequences: list[SequenceInputs], *, charge: bool = False) -> None:
        """Subtracts sequences that have left the queue; if they run, their callers are charged."""
        for share, group in groupby(sequences, _share):
            durations = list(map(_seconds, group))
            seconds = sum(durations)
            share.sequences -= len(durations)
            share.seconds -= seconds
            self._queued_seconds -= seconds
            if charge:
                share.virtual_time += seconds / share.caller.weight
        if self._bulk:
            for sequence in sequences:
                sequence.request.queued_sequences -= 1
                sequence.request.queued_seconds -= sequence.plan.seconds
        if not self._buckets:  # rounding errors do not add up
            self._queued_seconds = 0.0
            self._shares.reset()


def _join(batch: Batch, buckets: list[Bucket], now: float, expired: list[Request]) -> list[SequenceInputs]:
    """Takes sequences that gain by it out of buckets; see `Queue._fill`."""
    most = max(1, LOOK_AHEAD // max(1, len(buckets)))
    lengths = batch.sequences[0].lengths
    unequal, unwanted = [], []

    def is_wanted(sequence: SequenceInputs) -> bool:
        if _is_wanted(sequence, now, expired):
            return True
        unwanted.append(sequence)
        return False

    for sequence in chain.from_iterable(islice(bucket, most) for bucket in buckets):
        if sequence.lengths != lengths:
            unequal.append(sequence)
        elif is_wanted(sequence):
            batch.add(sequence)
    if not batch.is_full:
        unequal.sort(key=lambda sequence: sum(map(abs, map(sub, sequence.lengths, lengths))))
        batch.add_padded(filter(is_wanted, unequal))
    gone = {*batch.sequences, *unwanted}
    for bucket in buckets:
        window = [bucket.popleft() for _ in range(min(len(bucket), most))]
        bucket.extendleft(sequence for sequence in reversed(window) if sequence not in gone)
    return unwanted


def _first(bucket: Bucket) -> tuple[float, float, int]:
    head = bucket[0]
    return head.request.share.virtual_time, head.start_tag, head.request.number


def _is_wanted(sequence: SequenceInputs, now: float, expired: list[Request]) -> bool:
    """Whether a sequence still needs its result and can get it in time; notes its request if it cannot."""
    request = sequence.request
    if request.is_done or request in expired:
        return False
    if request.deadline == math.inf:
        return True
    if now + request.model.least_seconds(request.plan.longest) <= request.deadline:
        return True
    expired.append(request)
    return False
