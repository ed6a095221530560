"""Runs what waits, a few runs at a time, on threads of its own or on that of a caller who offers it.

No lock is held while a future resolves, so its callbacks may submit and cancel as they like.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from server.engine.arena import Burst
from server.engine.batch_queue import Entry, Group, Progress, RunQueue
from server.engine.errors import DeadlineExceededError, EngineError, RunFailedError, ShuttingDownError
from server.engine.execute import run_batch
from server.engine.limits import Limits
from server.engine.observer import Observer, Run
from server.engine.types import Array, Result, Work

log = logging.getLogger(__name__)
# While one run is split and answered, which takes one core, another computes.
PARALLEL_RUNS = 2
# How much longer a run may keep a caller's thread that has nothing else to do.
ALONE_FACTOR = 10


class Scheduler:
    """Runs submitted work until it is closed."""

    def __init__(self, limits: Limits, observer: Observer, *, parallel_runs: int = PARALLEL_RUNS) -> None:
        self._observer = observer
        self._queue = RunQueue(limits)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # How many more runs may begin; one that is handed to a thread has begun.
        self._free = self._parallel_runs = parallel_runs
        self._handed: deque[Group] = deque()
        self._burst = Burst()
        # Whether the threads are to empty the queue, or callers take turns.
        self._called = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name="scheduler", daemon=True) for _ in range(parallel_runs)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work, *, wake: bool = True) -> Future[Result]:
        """Queues work; its future resolves with the result or an `EngineError`.

        Args:
            work: What to run.
            wake: False if the calling thread calls `run_inline` next; `Engine` decides this.

        Raises:
            OverloadedError: The limit of memory in flight is reached.
            ShuttingDownError: The scheduler is closing.
        """
        with self._lock:
            if self._closing:
                raise ShuttingDownError("the server is shutting down and takes no new requests")
            number = self._queue.add(work, time.monotonic())
            if wake:
                self._call_thread()
        # By number: a future that held its work would make garbage for the collector.
        work.future.add_done_callback(lambda _: self._release(number))
        return work.future

    def run_inline(self, limit_seconds: float) -> bool:
        """Runs what is next on the calling thread, where a run may begin: that saves waking another.

        Args:
            limit_seconds: A run that is expected to take longer, or that waits for company, is left to the
                scheduler's threads. Where nothing else runs or waits it may take ten times as long.

        Returns:
            Whether something ran, so that there may be more to run.
        """
        with self._lock:
            if not self._free or not self._queue:
                return False
            now = time.monotonic()
            if self._queue.due(now) > now:
                self._call_thread()
                return False
            group, expired = self._take(now)
            is_alone = not self._queue and self._free == self._parallel_runs - 1
            limit_seconds *= ALONE_FACTOR if is_alone else 1
            if is_long := group is not None and group.seconds > limit_seconds:
                self._handed.append(group)
                self._call_thread()
        _fail_expired(expired)
        if group is None or is_long:
            return False
        self._run_and_pass_on(group)
        return True

    def close(self) -> None:
        """Takes no more work, finishes what is queued and ends the threads."""
        with self._lock:
            self._closing = self._called = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _call_thread(self) -> None:
        self._called = True
        self._changed.notify()

    def _release(self, number: int) -> None:
        with self._lock:
            self._queue.release(number)

    def _loop(self) -> None:
        while group := self._next():
            self._run_and_pass_on(group)
            self._give_back()

    def _run_and_pass_on(self, group: Group) -> None:
        """Runs a group, and then lets the next run begin."""
        try:
            self._run(group.entries)
        finally:
            with self._lock:
                self._burst.note(group.work.model, group.scratch_bytes, time.monotonic())
                self._free += 1
                if self._called:
                    self._changed.notify()

    def _next(self) -> Group | None:
        """Waits until a thread has something to run; None when closed and done."""
        while True:
            with self._lock:
                called = self._changed.wait_for(self._is_threads_turn, self._burst.wait_seconds)
                if self._handed:
                    return self._handed.popleft()
                if called and not self._queue and self._closing:
                    return None
                group, expired = self._wait_until_due() if called else (None, [])
            _fail_expired(expired)
            if group:
                return group
            self._give_back()

    def _give_back(self) -> None:
        """Gives back what a burst of large runs left behind, some time after the last of them."""
        with self._lock:
            model = self._burst.over(time.monotonic())
        if model:
            model.give_back()

    def _is_threads_turn(self) -> bool:
        if self._handed:
            return True
        self._called = self._called and (bool(self._queue) or self._closing)
        return self._called and self._free > 0

    def _wait_until_due(self) -> tuple[Group | None, list[Work]]:
        now = time.monotonic()
        if not self._closing and (wait := self._queue.due(now) - now) > 0:
            self._changed.wait(wait)
            return None, []
        group, expired = self._take(now)
        if self._queue:
            self._changed.notify()
        return group, expired

    def _take(self, now: float) -> tuple[Group | None, list[Work]]:
        group, expired = self._queue.next(now)
        self._free -= group is not None
        return group, expired

    def _run(self, entries: list[Entry]) -> None:
        """Runs entries together; where that fails, one by one, so that only the culprit fails."""
        work = entries[0].work
        started = time.monotonic()
        try:
            results = run_batch(work.model, [e.item for e in entries], return_weights=work.return_weights)
        except Exception:
            log.exception("run failed", extra={"model": work.model.name, "sequences": len(entries)})
            if len(entries) == 1:
                _fail(work, RunFailedError("the runtime failed on this request; see the server's log"))
                return
            for entry in entries:
                if not entry.work.future.done():
                    self._run([entry])
            return
        self._observe(entries, started)
        for progress in self._deliver(entries, results):
            progress.resolve()

    def _deliver(self, entries: list[Entry], results: list[dict[str, Array]]) -> list[Progress]:
        """Keeps the results of a run and returns the works that are complete with them.

        Their memory is given back here, before their callers wake: the next request may need the room.
        """
        with self._lock:
            complete = [
                entry.progress
                for entry, outputs in zip(entries, results, strict=True)
                if entry.progress.deliver(entry.index, outputs)
            ]
            for progress in complete:
                self._queue.release(progress.number)
        return complete

    def _observe(self, entries: list[Entry], started: float) -> None:
        sizes = [entry.item.sizes for entry in entries]
        rows = [sum(size.values()) for size in sizes]
        longest = sum(max(size[axis] for size in sizes) for axis in sizes[0])
        run = Run(
            model=entries[0].work.model.name,
            sequences=len(entries),
            tokens=sum(rows),
            padding=longest * len(entries) - sum(rows),
            waited=[started - entry.progress.queued_at for entry in entries],
            seconds=time.monotonic() - started,
        )
        try:
            self._observer.ran(run)
        except Exception:  # whoever watches must not stop those who are watched
            log.exception("observer failed")


def _fail_expired(works: list[Work]) -> None:
    for work in works:
        _fail(work, DeadlineExceededError("the deadline passed while the request waited in the queue"))


def _fail(work: Work, error: EngineError) -> None:
    with suppress(InvalidStateError):  # the caller left, or another sequence of the request failed first
        work.future.set_exception(error)
