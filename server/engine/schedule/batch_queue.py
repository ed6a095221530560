"""The queue of validated requests: decides what runs next. Has no thread, lock or clock of its own.

Sequences run in turns. The turn of a request's first sequence is the present one, and each further sequence
comes later by the expected duration of those before it. Requests of one sequence therefore run in the order
of their arrival, and a request of thousands shares the runs with the others instead of stopping them.
Source: start-time fair queueing, Goyal, Vin and Cheng 1996.

This is the order among the requests of one caller. If several callers have queued sequences, they take turns
by what each of them has run: see `server.engine.schedule.fair_shares`.

The sequence whose turn is next is part of every batch. Others join its batch if that is expected to cost less
than a run of their own. Only a sequence whose run does not fit into the memory that is left waits while later
ones run.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs, ValidatedRequest
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.fair_shares import ANYONE, Caller, CallerShare, FairShares

# How many sequences behind the oldest are considered for its batch.
LOOK_AHEAD = 256
# Sequences of one bucket run on the same graph of the same model, and are of the same caller. They are in the
# order of their turns.
BucketKey = tuple[LoadedModel, GraphKind, CallerShare]
Bucket = deque[SequenceInputs]
_turn = attrgetter("turn")
_order = attrgetter("turn", "number")


class BatchQueue:
    """Queued sequences, in buckets of those that may run together.

    Attributes:
        sequences: Number of queued sequences.
        seconds: Sum of the expected durations of a run for each queued sequence.
    """

    def __init__(self, limits: Limits) -> None:
        self.sequences = 0
        self.seconds = 0.0
        self._limits = limits
        self._buckets: dict[BucketKey, Bucket] = {}
        self._shares = FairShares()
        self._requests: dict[int, ValidatedRequest] = {}
        # Those of several sequences.
        self._bulk: dict[int, ValidatedRequest] = {}
        self._next_number = 0

    def __bool__(self) -> bool:
        return bool(self._buckets)

    @property
    def oldest(self) -> float | None:
        """When the sequence whose turn is next was queued; None if the queue is empty."""
        return self._next_bucket()[0].request.queued_at if self._buckets else None

    def seconds_before(self, own: float, caller: Caller = ANYONE) -> float:
        """Expected duration of the runs that come before the end of a request that is queued now.

        Args:
            own: Expected duration of the request's own runs. A request of several sequences runs no more
                than this, and one sequence, before it.
            caller: Whose request it is. Another caller runs no more before it than its share.
        """
        if self._shares.is_single and caller is ANYONE:
            return self._seconds_left(self.seconds, own, self._bulk.values())
        bulk = [request for request in self._bulk.values() if request.caller == caller]
        of_caller = self._seconds_left(self._shares.seconds_of(caller), own, bulk)
        return of_caller + self._shares.seconds_before(caller, of_caller + own)

    @staticmethod
    def _seconds_left(seconds: float, own: float, bulk: Iterable[ValidatedRequest]) -> float:
        """Those of some seconds of one caller that come before the end of its next request."""
        later = [request.queued_seconds - request.form.longest_seconds - own for request in bulk]
        return max(0.0, seconds - sum(more for more in later if more > 0))

    def add(self, request: ValidatedRequest, now: float) -> None:
        """Queues a request."""
        number, sequences, form = self._next_number, request.sequences, request.form
        share = request.share = self._shares.of(request.caller)
        request.number, request.queued_at, request.queued_seconds = number, now, form.seconds
        request.missing = count = len(sequences)
        request.results = [{}] * count
        turn = share.turn
        for index, sequence in enumerate(sequences):
            sequence.request, sequence.index = request, index
            sequence.number, sequence.turn = number + index, turn
            turn += sequence.shape.seconds
        self._requests[number] = request
        if count > 1:
            self._bulk[number] = request
        key = (request.model, form.graph, share)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
        if not bucket or bucket[-1].turn <= sequences[0].turn:  # the usual case
            bucket.extend(sequences)
        else:
            _insert(bucket, sequences)
        self._next_number += count
        self.sequences += count
        self.seconds += form.seconds
        share.sequences += count
        share.seconds += form.seconds

    def release(self, request: ValidatedRequest) -> bool:
        """Removes a request that has its result or was given up; returns whether it had not ended before."""
        if request.is_done:
            return False
        request.is_done = True
        del self._requests[request.number]
        if request.missing:
            self._remove(request)
        if self._bulk:
            self._bulk.pop(request.number, None)
        return True

    def clear(self) -> list[ValidatedRequest]:
        """Takes every sequence out of the queue; returns the requests, which are yet to be released."""
        self._bulk.clear()
        self._buckets.clear()
        self._count_left([])
        return list(self._requests.values())

    def due(self, now: float) -> float:
        """When the next batch may run: now, unless a batching delay lets its first sequence wait."""
        bucket = self._next_bucket()
        if not self._limits.batch_delay_seconds or len(bucket) >= self._limits.max_batch_sequences:
            return now
        return bucket[0].request.queued_at + self._limits.batch_delay_seconds

    def next(
        self, now: float, free_bytes: float = math.inf, slots: int = 1, free_slots: int = 1
    ) -> tuple[Batch | None, list[ValidatedRequest]]:
        """Takes the next batch out of the queue.

        Args:
            now: The current time.
            free_bytes: Memory that the run may take.
            slots: Number of runs at a time. While the first sequence waits for memory, each run of later ones
                may take this part of what the first leaves.
            free_slots: Number of runs that may start now. The work is divided among them.

        Returns:
            The batch, or None if nothing is left to run or fits; and the requests whose deadline has passed
            or would pass before the end of their run.
        """
        expired: list[ValidatedRequest] = []
        share = self.seconds / free_slots
        while self._buckets:
            found = self._first_that_fits(free_bytes, slots)
            if found is None:
                break
            bucket, at = found
            head = bucket[at]
            del bucket[at]
            batch = None
            if _is_wanted(head, now, expired):
                self._serve(head)
                batch = self._batch(Batch(self._limits, head, free_bytes, share), bucket, now, expired)
            if not bucket:
                del self._buckets[head.request.model, head.request.form.graph, head.request.share]
            self._count_left(batch.sequences if batch else [head])
            if batch:
                self._charge(batch)
                return batch, expired
        return None, expired

    def _serve(self, head: SequenceInputs) -> None:
        share = head.request.share
        share.turn = max(share.turn, head.turn)
        if not self._shares.is_single:
            self._shares.served(share)

    def _charge(self, batch: Batch) -> None:
        """Advances the clocks of the callers, unless there is one only, whose turn it is in any case."""
        if not self._shares.is_single:
            for queued in batch.sequences:
                queued.request.share.ran(queued.shape.seconds)

    def _first_that_fits(self, free_bytes: float, slots: int) -> tuple[Bucket, int] | None:
        """The bucket and place of the first sequence whose run fits into the memory."""
        bucket = self._next_bucket()
        if bucket[0].shape.run_bytes <= free_bytes:
            return bucket, 0
        limit = min(free_bytes, (self._limits.max_run_bytes - bucket[0].shape.run_bytes) / slots)
        for bucket in sorted(self._buckets.values(), key=_first):
            for at in range(min(len(bucket), LOOK_AHEAD)):
                if bucket[at].shape.run_bytes <= limit:
                    return bucket, at
        return None

    def _remove(self, request: ValidatedRequest) -> None:
        key = (request.model, request.form.graph, request.share)
        bucket = self._buckets.pop(key, ())
        kept = deque(queued for queued in bucket if queued.request is not request)
        if kept:
            self._buckets[key] = kept
        self._count_left([queued for queued in bucket if queued.request is request])

    def _count_left(self, left: list[SequenceInputs]) -> None:
        """Records that sequences have left the queue."""
        for queued in left:
            request, seconds = queued.request, queued.shape.seconds
            request.queued_seconds -= seconds
            request.share.sequences -= 1
            request.share.seconds -= seconds
        if self._buckets:
            self.sequences -= len(left)
            self.seconds -= sum([queued.shape.seconds for queued in left])
        else:  # rounding errors do not add up
            self.sequences, self.seconds = 0, 0.0
            self._shares.clear()

    def _next_bucket(self) -> Bucket:
        return min(self._buckets.values(), key=_first)

    def _batch(
        self,
        batch: Batch,
        bucket: Bucket,
        now: float,
        expired: list[ValidatedRequest],
    ) -> Batch:
        """Takes sequences that gain by joining the batch out of the queue, nearest in length first."""
        head = batch.sequences[0]
        is_one = len(head.request.sequences) == 1
        if is_one and self._shares.is_single:
            batch.take_alike(bucket, now)
            if not bucket:
                return batch
        if batch.is_full or (batch.is_closed and is_one):
            return batch
        buckets = [bucket] if self._shares.is_single else self._buckets_like(head)
        most = max(1, LOOK_AHEAD // max(1, len(buckets)))
        window = [own.popleft() for own in buckets for _ in range(min(len(own), most))]
        unwanted: list[SequenceInputs] = []

        def is_wanted(queued: SequenceInputs) -> bool:
            if _is_wanted(queued, now, expired):
                return True
            unwanted.append(queued)
            return False

        query, key = lengths = head.lengths
        for queued in window:
            if queued.lengths == lengths and is_wanted(queued):
                batch.add(queued)
        if not batch.is_full:
            others = [queued for queued in window if queued.lengths != lengths]
            others.sort(key=lambda queued: abs(queued.lengths[0] - query) + abs(queued.lengths[1] - key))
            batch.mix(filter(is_wanted, others))
        self._count_left(unwanted)
        gone = {*batch.sequences, *unwanted}
        rest = [queued for queued in window if queued not in gone]
        if self._shares.is_single:
            bucket.extendleft(reversed(rest))
        else:
            rest.sort(key=_order)
            self._put_back(rest, head)
        return batch

    def _buckets_like(self, head: SequenceInputs) -> list[Bucket]:
        """The buckets of all callers for the same graph of the same model, in the order of their turns."""
        model, graph = head.request.model, head.request.form.graph
        found = [own for key, own in self._buckets.items() if own and key[0] is model and key[1] is graph]
        return sorted(found, key=_first)

    def _put_back(self, rest: list[SequenceInputs], head: SequenceInputs) -> None:
        """Puts sequences of several callers back. Removes empty buckets, except that of the head."""
        for queued in reversed(rest):
            request = queued.request
            self._buckets[request.model, request.form.graph, queued.request.share].appendleft(queued)
        for key in [
            key for key, own in self._buckets.items() if not own and key[2] is not head.request.share
        ]:
            del self._buckets[key]


def _first(bucket: Bucket) -> tuple[float, float, int]:
    head = bucket[0]
    return head.request.share.clock, head.turn, head.number


def _insert(bucket: Bucket, queued: tuple[SequenceInputs, ...]) -> None:
    """Inserts the sequences of a new request, after those with the same turn."""
    if len(queued) == 1:
        bucket.insert(bisect_right(bucket, queued[0].turn, key=_turn), queued[0])
    else:
        merged = list(merge(bucket, queued, key=_turn))
        bucket.clear()
        bucket.extend(merged)


def _is_wanted(queued: SequenceInputs, now: float, expired: list[ValidatedRequest]) -> bool:
    """Whether a sequence still needs its result and can get it in time; notes its request if it cannot."""
    request = queued.request
    if request.is_done or request in expired:
        return False
    if now + request.form.least_seconds <= request.deadline:
        return True
    expired.append(request)
    return False
