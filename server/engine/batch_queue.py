"""What waits, and which of it runs next. Decides only: it has no threads, no locks and no clock.

The oldest sequence that waits is part of every run, so each waits at most for the runs of those that
came before it. Sequences join its run where that is expected to cost less than a run of their own.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from artifact.manifest import GraphKind
from server.engine.errors import OverloadedError
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.types import Array, Result, Work

# How many sequences behind the oldest are looked at for company.
LOOK_AHEAD = 256
# A run that takes as long as so many calls cost beside their arithmetic takes no other request.
ENOUGH_CALLS = 20
Lane = tuple[LoadedModel, bool, bool]


@dataclass(eq=False)
class Progress:
    """A work in the queue and the results that it has so far."""

    work: Work
    number: int
    queued_at: float
    results: list[dict[str, Array]] = field(init=False)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.work.items)
        self.results = [{}] * self.missing

    def deliver(self, index: int, outputs: dict[str, Array]) -> bool:
        """Keeps the outputs of one sequence; whether they were the last that missed."""
        self.results[index] = outputs
        self.missing -= 1
        return not self.missing

    def resolve(self) -> None:
        """Resolves the work's future with its results."""
        by_name = {name: [result[name] for result in self.results] for name in self.results[0]}
        with suppress(InvalidStateError):  # the caller left during the run
            self.work.future.set_result(Result(by_name))


class Entry:
    """One sequence in the queue.

    Attributes:
        number: Its place in the order of arrival.
        lengths: Query and key length; self-attention has one length.
    """

    __slots__ = ("index", "item", "lengths", "number", "progress", "work")

    def __init__(self, progress: Progress, index: int, number: int) -> None:
        self.progress = progress
        self.index = index
        self.number = number
        self.work = progress.work
        self.item = self.work.items[index]
        sizes = tuple(self.item.sizes.values())
        self.lengths = (sizes[0], sizes[-1])


class RunQueue:
    """The sequences that wait, in lanes of those that may run together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes: dict[Lane, deque[Entry]] = {}
        self._held: dict[int, Progress] = {}
        self._in_flight_bytes = 0
        self._next_number = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, work: Work, now: float) -> int:
        """Queues a work and returns the number to release it by.

        Raises:
            OverloadedError: The limit of memory in flight is reached. A work beyond the limit is taken
                where nothing else is in flight.
        """
        bytes_held = self._in_flight_bytes + work.in_flight_bytes
        if bytes_held > self._limits.max_in_flight_bytes and self._held:
            raise OverloadedError(
                f"requests in flight would hold {bytes_held} bytes; the limit is "
                f"{self._limits.max_in_flight_bytes}; try again later"
            )
        self._in_flight_bytes = bytes_held
        number = self._next_number
        progress = self._held[number] = Progress(work, number, now)
        lane = self._lanes.setdefault(_lane_of(work), deque())
        for index in range(len(work.items)):
            lane.append(Entry(progress, index, self._next_number))
            self._next_number += 1
        return number

    def release(self, number: int) -> None:
        """Takes a work that ended, or was given up, out of the account and the queue; may be called twice."""
        if progress := self._held.pop(number, None):
            self._in_flight_bytes -= progress.work.in_flight_bytes
            if progress.missing:
                self._remove(progress.work)

    def _remove(self, work: Work) -> None:
        lane_key = _lane_of(work)
        left = deque(entry for entry in self._lanes.pop(lane_key, ()) if entry.work is not work)
        if left:
            self._lanes[lane_key] = left

    def due(self, now: float) -> float:
        """When the next run may begin: now, unless a setting lets the oldest wait for company."""
        lane = self._oldest_lane()
        if not self._limits.batch_delay_seconds or len(lane) >= self._limits.max_batch_sequences:
            return now
        return lane[0].progress.queued_at + self._limits.batch_delay_seconds

    def next(self, now: float) -> tuple["Group | None", list[Work]]:
        """Takes the sequences of the next run out of the queue.

        Returns:
            The run, or None where nothing is left to run; and the works found to be past their deadline.
        """
        expired: list[Work] = []
        while self._lanes:
            lane = self._oldest_lane()
            head = lane.popleft()
            group = self._group(head, lane, now, expired) if _is_wanted(head, now, expired) else None
            if not lane:
                del self._lanes[_lane_of(head.work)]
            if group:
                return group, expired
        return None, expired

    def _oldest_lane(self) -> deque[Entry]:
        return min(self._lanes.values(), key=lambda lane: lane[0].number)

    def _group(self, head: Entry, lane: deque[Entry], now: float, expired: list[Work]) -> "Group":
        """Takes out of a lane what gains by running with its oldest entry, the nearest in length first."""
        group = Group(self._limits, head)
        if group.is_full:
            return group
        window = [lane.popleft() for _ in range(min(len(lane), LOOK_AHEAD))]
        wanted = [entry for entry in window if _is_wanted(entry, now, expired)]
        query, key = head.lengths
        wanted.sort(key=lambda entry: abs(entry.lengths[0] - query) + abs(entry.lengths[1] - key))
        left = sorted((entry for entry in wanted if not group.add(entry)), key=lambda entry: entry.number)
        lane.extendleft(reversed(left))
        return group


class Group:
    """Sequences of one run, and what the run is expected to cost."""

    def __init__(self, limits: Limits, head: Entry) -> None:
        self._limits = limits
        self._model = head.work.model
        self._kind = _kind(head)
        self._lengths = head.lengths
        self.entries = [head]
        self.seconds = self._model.seconds(self._kind, 1, *self._lengths)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def work(self) -> Work:
        """The oldest request of the run."""
        return self.entries[0].work

    @property
    def scratch_bytes(self) -> int:
        """Memory of the run: its padded inputs and attention scores."""
        return self._model.padded_bytes(len(self.entries), *self._lengths)

    @property
    def is_full(self) -> bool:
        """Whether no other sequence may join."""
        return self._model.runs_alone or len(self.entries) >= self._limits.max_batch_sequences

    def _has_enough(self) -> bool:
        """Whether another request had better run by itself.

        Joining saves its call. Where that is next to nothing of the whole, answers had better leave while
        others are computed than all at once.
        """
        return self.seconds > ENOUGH_CALLS * self._model.cost(self._kind).call

    def add(self, entry: Entry) -> bool:
        """Takes an entry where that costs less than a run of its own and keeps the limits."""
        own, count = entry.lengths, len(self.entries) + 1
        lengths = (max(self._lengths[0], own[0]), max(self._lengths[1], own[1]))
        same = own == self._lengths and lengths == self._lengths
        if self.is_full or not (same or self._model.mixes_lengths):
            return False
        if entry.work is not self.work and self._has_enough():
            return False
        if self._model.padded_bytes(count, *lengths) > self._limits.max_batch_bytes:
            return False
        padded = not same and self._model.sees_padding
        kind = GraphKind.LENGTHS if padded and self._kind is GraphKind.PLAIN else self._kind
        seconds = self._model.seconds(kind, count, *lengths)
        # Equal lengths have no padding to lose by.
        if not same and seconds > self.seconds + self._model.seconds(_kind(entry), 1, *own):
            return False
        self.entries.append(entry)
        self._kind, self._lengths, self.seconds = kind, lengths, seconds
        return True


def _kind(entry: Entry) -> GraphKind:
    """The graph that computes an entry by itself."""
    if entry.work.return_weights:
        return GraphKind.WEIGHTS
    return GraphKind.MASK if entry.work.masked else GraphKind.PLAIN


def _lane_of(work: Work) -> Lane:
    return work.model, work.return_weights, work.masked


def _is_wanted(entry: Entry, now: float, expired: list[Work]) -> bool:
    """False for an entry whose caller left, or whose time is over: its work is noted as expired."""
    work = entry.work
    if work.future.done() or work in expired:
        return False
    if now < work.deadline:
        return True
    expired.append(work)
    return False
