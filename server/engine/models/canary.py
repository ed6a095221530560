"""Decides which golden vectors of the served models are replayed next, and when.

Every golden case of every model is replayed once in a period, one at a time, on each session that may serve
it. Has no thread, lock or clock of its own.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from attention_serving.artifact.golden import GoldenCase
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Model
from attention_serving.server.engine.run.session import Session

# The largest part of the time that replays take: while nothing else is computed, and while something is.
IDLE_SHARE, BUSY_SHARE = 0.1, 0.001
# How often it is looked, between two replays, whether the engine is idle.
LOOKS = 10
MIN_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.01, 1.0


@dataclass(frozen=True)
class Check:
    """One golden case on one session.

    Attributes:
        model: The model, which a check does not keep loaded.
        case: Index of the case among the model's golden vectors.
        is_parallel: Whether the session is the one that computes on all threads.
    """

    model: "weakref.ref[LoadedModel]"
    case: int
    is_parallel: bool

    def session(self, model: LoadedModel) -> Session:
        """The session of the model, which also serves requests."""
        sessions = model.parallel_sessions if self.is_parallel else model.sessions
        return sessions[model.golden[self.case].graph]


def checks_of(model: LoadedModel) -> list[Check]:
    """Every golden case of a model, on each session that computes its graph."""
    return [
        Check(weakref.ref(model), index, is_parallel)
        for is_parallel, sessions in ((False, model.sessions), (True, model.parallel_sessions))
        for index, case in enumerate(model.golden)
        if case.graph in sessions
    ]


def run_bytes(model: LoadedModel, case: GoldenCase) -> int:
    """Expected memory of the replay of a golden case, in bytes. The longest input counts for all."""
    shapes = [case.inputs[spec.name].shape for spec in model.inputs]
    batch, length = (max(shape[at] for shape in shapes) for at in (0, 1))
    return model.run_bytes(case.graph, batch, length, length)


class CanarySchedule:
    """Spreads the checks of all models evenly over a period, and prefers moments when the engine is idle.

    A check is due at a fixed interval after the last. While the engine is busy it waits, for one interval at
    most: then it runs in spite of that, so that an engine that is never idle is watched too.
    """

    def __init__(self, seconds: float, now: float) -> None:
        """Begins a first period.

        Args:
            seconds: The period, above 0.
            now: The current time, on any clock.
        """
        self._seconds = seconds
        self._interval = seconds
        self._round: deque[Check] = deque()
        self._due = now

    def delay(self, now: float) -> float:
        """How long to wait before `next` is asked again, in seconds."""
        look = min(max(self._interval / LOOKS, MIN_LOOK_SECONDS), MAX_LOOK_SECONDS)
        return max(self._due - now, look)

    def next(self, models: Iterable[Model], now: float, *, is_idle: bool) -> Check | None:
        """Takes the check that runs now; `ended` follows. None if none is to run.

        Args:
            models: The models that are served.
            now: The current time.
            is_idle: Whether no request waits or is computed.
        """
        if now < self._due or not (is_idle or now >= self._due + self._interval):
            return None
        served = [model for model in models if isinstance(model, LoadedModel)]
        self._round = deque(check for check in self._round if check.model() in served)
        if not self._round:
            self._round.extend(check for model in served for check in checks_of(model))
            self._interval = self._seconds / max(len(self._round), 1)
        if not self._round:
            self._due = now + self._interval
            return None
        return self._round.popleft()

    def ended(self, now: float, seconds: float, *, was_idle: bool) -> None:
        """Sets when the next check is due.

        Args:
            now: The current time.
            seconds: How long the check took.
            was_idle: What `next` was told.
        """
        share = IDLE_SHARE if was_idle else BUSY_SHARE
        self._due = max(self._due + self._interval, now + seconds * (1 / share - 1))
