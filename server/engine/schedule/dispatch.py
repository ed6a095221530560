"""Decides which batch runs next and on which thread. Has no thread, lock or clock of its own.

Runs start on the engine's threads, or inline on the one thread that calls `next_inline`. While a slot is
free and a batch may run, a thread is responsible for the queue: the inline thread if it is about to ask, or
asks after a short run, and otherwise the engine's threads (`needs_thread`).
"""

import math
from collections import deque

from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.batch_queue import BatchQueue
from attention_serving.server.engine.schedule.fair_shares import ANYONE, Caller

# How much longer an inline run may take if nothing else runs or is queued.
IDLE_FACTOR = 10
# A batch, or None if none may start; and the requests that cannot be answered in time.
Next = tuple[Batch | None, list[ValidatedRequest]]
NOTHING: Next = (None, [])


class Dispatch:
    """The queue and the slots that its batches run in.

    Attributes:
        queue: The queued sequences.
        running: Batches that have started or were handed over to the engine's threads, and the expected
            memory of each, in bytes.
    """

    def __init__(self, limits: Limits, slots: int) -> None:
        """Creates a dispatch of an empty queue.

        Args:
            limits: Bounds of batches and of the memory of runs.
            slots: Number of batches that may run at a time.
        """
        self.queue = BatchQueue(limits)
        self.running: dict[Batch, int] = {}
        self._running_seconds = 0.0
        self._max_run_bytes = limits.max_run_bytes
        self._slots = slots
        self._handed_over: deque[Batch] = deque()
        # Whether the inline thread will ask for a batch without being woken, at once or after a short run.
        self._inline_is_due = False
        # Whether another thread has submitted since the queue was last empty: the inline thread may be busy.
        self._threads_asked = False
        # Whether the queued work does not fit beside the runs in progress.
        self._waits_for_memory = False
        self._closing = False

    @property
    def needs_thread(self) -> bool:
        """Whether one of the engine's threads must call `next`."""
        if self._handed_over or self.is_complete:
            return True
        may_start = bool(self.queue) and len(self.running) < self._slots and not self._waits_for_memory
        return may_start and (self._threads_asked or not self._inline_is_due)

    @property
    def work(self) -> float:
        """Sum of the expected durations of a run for each queued and each running sequence."""
        return self.queue.seconds + self._running_seconds

    def work_before(self, own: float, caller: Caller = ANYONE) -> float:
        """Work that comes before the end of a request that is queued now, given its own work and caller."""
        return self.queue.seconds_before(own, caller) + self._running_seconds

    @property
    def is_complete(self) -> bool:
        """Whether the dispatch was closed and everything has run."""
        return self._closing and not self.queue and not self.running

    def close(self) -> None:
        """Leaves the rest of the queue to the engine's threads, without any batching delay."""
        self._closing, self._inline_is_due = True, False

    def add(self, request: ValidatedRequest, now: float, *, inline: bool) -> None:
        """Queues a request.

        Args:
            request: The request.
            now: The current time.
            inline: Whether the caller calls `next_inline` next.
        """
        self.queue.add(request, now)
        self._waits_for_memory = False
        if inline and not self._closing:
            self._inline_is_due = True
        else:
            self._threads_asked = True

    def release(self, request: ValidatedRequest) -> bool:
        """Removes a request that has its result or was given up; returns whether it had not ended before."""
        self._waits_for_memory = False  # the sequence that did not fit may be gone
        return self.queue.release(request)

    def next_inline(self, now: float, limit_seconds: float) -> Next:
        """Takes a batch to run on the inline thread, which then asks again.

        A batch that is expected to take longer than the limit, or that has spans, is handed over to the
        engine's threads. If nothing else runs or is queued, the limit is ten times as large.
        """
        self._inline_is_due = False
        if not self.queue or len(self.running) >= self._slots or self.queue.due(now) > now:
            return NOTHING
        batch, expired = self._take(now)
        if batch is None:
            return None, expired
        is_idle = not self.queue and len(self.running) == 1
        if batch.seconds > limit_seconds * (IDLE_FACTOR if is_idle else 1) or batch.has_spans:
            self._handed_over.append(batch)
            return None, expired
        self._inline_is_due = not self._closing
        return batch, expired

    def next(self, now: float) -> Next:
        """Takes a batch to run on one of the engine's threads."""
        if self._handed_over:
            return self._handed_over.popleft(), []
        if not self.needs_thread or self.is_complete or self.delay(now) > 0:
            return NOTHING
        return self._take(now)

    def delay(self, now: float) -> float:
        """Seconds until the batching delay of the oldest sequence has passed."""
        if self._closing or self._handed_over or not self.queue:
            return 0.0
        return self.queue.due(now) - now

    def ended(self, batch: Batch) -> None:
        """Frees the slot and the memory of a batch."""
        del self.running[batch]
        # Rounding errors do not add up.
        self._running_seconds = self._running_seconds - batch.seconds_alone if self.running else 0.0
        self._waits_for_memory = False

    def _take(self, now: float) -> Next:
        # If nothing runs, a run may start even if its estimate exceeds the limit.
        free = self._max_run_bytes - sum(self.running.values()) if self.running else math.inf
        batch, expired = self.queue.next(now, free, self._slots, self._slots - len(self.running))
        if batch:
            batch.choose_threads(self.work)
            self.running[batch] = batch.run_bytes
            self._running_seconds += batch.seconds_alone
        self._threads_asked = self._threads_asked and bool(self.queue)
        self._waits_for_memory = batch is None and bool(self.queue)
        return batch, expired
