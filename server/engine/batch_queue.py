"""The queue of validated requests: decides what runs next. Has no thread, lock or clock of its own.

The oldest queued sequence is part of every batch, so that each sequence waits at most for the runs of
those that arrived before it. Others join its batch if that is expected to cost less than a run of their own.
"""

from collections import deque

from artifact.manifest import GraphKind
from server.engine.batch import Batch, PendingRequest, QueuedSequence
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.validation import ValidatedRequest

# How many sequences behind the oldest are considered for its batch.
LOOK_AHEAD = 256
# Sequences of one bucket run on the same graph of the same model.
BucketKey = tuple[LoadedModel, GraphKind]


class BatchQueue:
    """Queued sequences, in buckets of those that may run together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[BucketKey, deque[QueuedSequence]] = {}
        self._pending: dict[int, PendingRequest] = {}
        self._next_number = 0

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def add(self, request: ValidatedRequest, now: float) -> int:
        """Queues a request and returns the number to release it by."""
        number = self._next_number
        pending = PendingRequest(request, number, now)
        queued = [QueuedSequence(pending, index, number + index) for index in range(len(request.sequences))]
        self._pending[number] = pending
        self._buckets.setdefault((request.model, request.graph), deque()).extend(queued)
        self._next_number += len(queued)
        return number

    def release(self, number: int) -> None:
        """Removes a request that ended or was given up. May be called twice."""
        pending = self._pending.pop(number, None)
        if pending and pending.missing:
            self._remove(pending.request)

    def clear(self) -> list[ValidatedRequest]:
        """Removes and returns every request that has not ended."""
        requests = [pending.request for pending in self._pending.values()]
        self._pending.clear()
        self._buckets.clear()
        return requests

    def due(self, now: float) -> float:
        """When the next batch may run: now, unless a batching delay lets its oldest sequence wait."""
        bucket = self._oldest_bucket()
        if not self._limits.batch_delay_seconds or len(bucket) >= self._limits.max_batch_sequences:
            return now
        return bucket[0].pending.queued_at + self._limits.batch_delay_seconds

    def next(self, now: float) -> tuple[Batch | None, list[ValidatedRequest]]:
        """Takes the next batch out of the queue.

        Returns:
            The batch, or None if nothing is left to run; and the requests whose deadline has passed.
        """
        expired: list[ValidatedRequest] = []
        while self._buckets:
            bucket = self._oldest_bucket()
            head = bucket.popleft()
            batch = self._batch(head, bucket, now, expired) if _is_wanted(head, now, expired) else None
            if not bucket:
                del self._buckets[head.request.model, head.request.graph]
            if batch:
                return batch, expired
        return None, expired

    def _remove(self, request: ValidatedRequest) -> None:
        key = (request.model, request.graph)
        kept = deque(queued for queued in self._buckets.pop(key, ()) if queued.request is not request)
        if kept:
            self._buckets[key] = kept

    def _oldest_bucket(self) -> deque[QueuedSequence]:
        return min(self._buckets.values(), key=lambda bucket: bucket[0].number)

    def _batch(
        self, head: QueuedSequence, bucket: deque[QueuedSequence], now: float, expired: list[ValidatedRequest]
    ) -> Batch:
        """Takes sequences that gain by running with the oldest out of its bucket, nearest in length first."""
        batch = Batch(self._limits, head)
        if batch.is_full:
            return batch
        window = [bucket.popleft() for _ in range(min(len(bucket), LOOK_AHEAD))]
        wanted = [queued for queued in window if _is_wanted(queued, now, expired)]
        query, key = head.lengths
        wanted.sort(key=lambda queued: abs(queued.lengths[0] - query) + abs(queued.lengths[1] - key))
        rest = [queued for queued in wanted if not batch.add(queued)]
        rest.sort(key=lambda queued: queued.number)
        bucket.extendleft(reversed(rest))
        return batch


def _is_wanted(queued: QueuedSequence, now: float, expired: list[ValidatedRequest]) -> bool:
    """Whether a sequence still needs its result; notes its request if the deadline has passed."""
    request = queued.request
    if request.future.done() or request in expired:
        return False
    if now < request.deadline:
        return True
    expired.append(request)
    return False
