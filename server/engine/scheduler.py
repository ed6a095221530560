"""Decides what runs together and when: one queue, one run at a time.

Sequences that wait for the same model and the same kind of answer run together where that is cheaper
than one after the other; nothing waits for company that has not arrived. The oldest sequence of the
queue is part of every run, so each waits at most for those that came before it.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from server.engine.batch import run_batch
from server.engine.errors import (
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    RunFailedError,
    ShuttingDownError,
)
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.observer import Observer, Run
from server.engine.values import Array, Item, Result, Work

log = logging.getLogger(__name__)

# What a run costs beside its arithmetic: about 50 microseconds at 100 GFLOP/s.
CALL_OVERHEAD_FLOPS = 5_000_000
# How far behind the oldest sequence the scheduler looks for company.
LOOK_AHEAD = 256


@dataclass(eq=False)
class _Progress:
    """A work in the queue and the results that it has so far."""

    work: Work
    queued_at: float
    results: list[dict[str, Array] | None] = field(init=False)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.work.items)
        self.results = [None] * self.missing


@dataclass(frozen=True, eq=False)
class _Entry:
    """One sequence in the queue."""

    progress: _Progress
    index: int

    @property
    def item(self) -> Item:
        return self.progress.work.items[self.index]

    @property
    def lane(self) -> tuple[LoadedModel, bool, bool]:
        """Entries of one lane may run together."""
        work = self.progress.work
        return work.model, work.return_weights, work.masked


class Scheduler:
    """Runs submitted work on a thread of its own, until it is closed."""

    def __init__(self, limits: Limits, observer: Observer) -> None:
        self._limits = limits
        self._observer = observer
        self._queue: deque[_Entry] = deque()
        self._held: set[Work] = set()
        self._changed = threading.Condition()
        self._in_flight_bytes = 0
        self._running = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, work: Work, *, run_here: bool = False) -> Future[Result]:
        """Queues work; its future resolves with the result or an `EngineError`.

        Args:
            work: What to run.
            run_here: Whether the calling thread, which has nothing else to do, may run a single sequence
                itself where nothing runs or waits: that saves waking another thread and being woken.

        Raises:
            OverloadedError: The limit of memory in flight is reached.
            ShuttingDownError: The scheduler is closing.
        """
        with self._changed:
            if self._closing:
                raise ShuttingDownError("the server is shutting down")
            bytes_held = self._in_flight_bytes + work.in_flight_bytes
            if bytes_held > self._limits.max_in_flight_bytes and self._held:
                raise OverloadedError(
                    f"requests in flight would hold {bytes_held} bytes; the limit is "
                    f"{self._limits.max_in_flight_bytes}; try again later"
                )
            self._in_flight_bytes = bytes_held
            self._held.add(work)
            progress = _Progress(work, time.monotonic())
            entries = [_Entry(progress, index) for index in range(len(work.items))]
            run_here = run_here and len(entries) == 1 and not self._running and not self._queue
            if run_here:
                self._running = True
            else:
                self._queue.extend(entries)
                self._changed.notify()
        work.future.add_done_callback(lambda _: self._drop(work))
        if run_here:
            self._run_alone(entries)
        return work.future

    def close(self) -> None:
        """Takes no more work, finishes what is queued and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _drop(self, work: Work) -> None:
        """Forgets a work that ended before its time, and what it has in the queue."""
        with self._changed:
            if work in self._held:
                self._queue = deque(entry for entry in self._queue if entry.progress.work is not work)
        self._release(work)

    def _release(self, work: Work) -> None:
        """Takes a work out of the account, once."""
        with self._changed:
            if work in self._held:
                self._held.remove(work)
                self._in_flight_bytes -= work.in_flight_bytes

    def _loop(self) -> None:
        while entries := self._next():
            self._run_alone(entries)

    def _run_alone(self, entries: list[_Entry]) -> None:
        """Runs entries, and then lets the next run begin. One run at a time has all cores."""
        try:
            self._run(entries)
        finally:
            with self._changed:
                self._running = False
                self._changed.notify()

    def _next(self) -> list[_Entry]:
        """Waits for its turn and takes the entries of one run; empty when closed and done."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: not self._running and (self._queue or self._closing))
                if not self._queue:
                    return []
                head = self._queue.popleft()
                if _is_wanted(head):
                    self._running = True
                    return [head, *self._take_company(head)]

    def _take_company(self, head: _Entry) -> list[_Entry]:
        """Removes from the queue what gains by running with its oldest entry."""
        group = _Group(self._limits, head)
        for entry in list(islice(self._queue, LOOK_AHEAD)):
            if entry.lane == head.lane and _is_wanted(entry):
                group.add(entry)
        taken = set(group.entries)
        self._queue = deque(entry for entry in self._queue if entry not in taken)
        return group.entries[1:]

    def _run(self, entries: list[_Entry]) -> None:
        """Runs entries together; where that fails, one by one, so that only the culprit fails."""
        work = entries[0].progress.work
        started = time.monotonic()
        try:
            results = run_batch(work.model, [e.item for e in entries], return_weights=work.return_weights)
        except Exception:
            log.exception("run failed", extra={"model": work.model.name, "sequences": len(entries)})
            if len(entries) == 1:
                _fail(work, RunFailedError("the runtime failed on this request; see the server's log"))
                return
            for entry in filter(_is_wanted, entries):
                self._run([entry])
            return
        for entry, result in zip(entries, results, strict=True):
            self._deliver(entry, result)
        try:
            self._observe(entries, started)
        except Exception:  # whoever watches must not stop those who are watched
            log.exception("observer failed")

    def _deliver(self, entry: _Entry, outputs: dict[str, Array]) -> None:
        progress = entry.progress
        progress.results[entry.index] = outputs
        progress.missing -= 1
        if progress.missing:
            return
        work = progress.work
        results = [result for result in progress.results if result is not None]
        by_name = {name: [result[name] for result in results] for name in results[0]}
        # Before its caller wakes: the next request may need the room.
        self._release(work)
        with suppress(InvalidStateError):  # the caller left during the run
            work.future.set_result(Result(work.model.name, work.model.version, by_name))

    def _observe(self, entries: list[_Entry], started: float) -> None:
        sizes = [entry.item.sizes for entry in entries]
        rows = [sum(size.values()) for size in sizes]
        longest = sum(max(size[axis] for size in sizes) for axis in sizes[0])
        self._observer.ran(
            Run(
                model=entries[0].progress.work.model.name,
                sequences=len(entries),
                tokens=sum(rows),
                padding=longest * len(entries) - sum(rows),
                waited=[started - entry.progress.queued_at for entry in entries],
                seconds=time.monotonic() - started,
            )
        )


class _Group:
    """Entries of one run, and what the run costs."""

    def __init__(self, limits: Limits, head: _Entry) -> None:
        self._limits = limits
        self._model = head.progress.work.model
        self.entries = [head]
        self._sizes = _lengths(head)
        self._flops = self._model.flops(1, *self._sizes)

    def add(self, entry: _Entry) -> bool:
        """Takes an entry where that costs less than a run of its own and keeps the limits."""
        own = _lengths(entry)
        sizes = (max(self._sizes[0], own[0]), max(self._sizes[1], own[1]))
        count = len(self.entries) + 1
        if count > self._limits.max_batch_sequences or self._model.runs_alone:
            return False
        if not self._model.mixes_lengths and entry.item.sizes != self.entries[0].item.sizes:
            return False
        if self._model.padded_bytes(count, *sizes) > self._limits.max_batch_bytes:
            return False
        flops = self._model.flops(count, *sizes)
        if flops > self._flops + self._model.flops(1, *own) + CALL_OVERHEAD_FLOPS:
            return False
        self.entries.append(entry)
        self._sizes, self._flops = sizes, flops
        return True


def _lengths(entry: _Entry) -> tuple[int, int]:
    """Query and key length."""
    sizes = list(entry.item.sizes.values())
    return sizes[0], sizes[-1]


def _is_wanted(entry: _Entry) -> bool:
    """False for an entry whose caller left, or whose time is over: that one is told so."""
    work = entry.progress.work
    if not work.future.done() and time.monotonic() >= work.deadline:
        _fail(work, DeadlineExceededError("the deadline passed while the request waited in the queue"))
    return not work.future.done()


def _fail(work: Work, error: EngineError) -> None:
    with suppress(InvalidStateError):  # the caller left, or another sequence of the request failed first
        work.future.set_exception(error)
