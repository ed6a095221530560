"""Watches parity in service: replays golden vectors of the served models, and withdraws one that drifts."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import ref

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import Parity, replay
from attention_serving.server.engine.models.repository import Model, Repository
from attention_serving.server.engine.run.session import Session
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.observe.metrics import CanaryMetrics
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)
# Takes a model out of service, with the reason for callers; returns whether it was in service.
Withdraw = Callable[[LoadedModel, str], bool]
# The largest part of the time that replays take: while nothing else is computed, and while something is.
IDLE_SHARE, BUSY_SHARE = 0.1, 0.001
# How often it is looked, between two replays, whether the engine is idle.
LOOKS = 10
MIN_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.01, 1.0


class Check(NamedTuple):
    """One golden case on one session.

    Attributes:
        model: The model, which a check does not keep loaded.
        case: Index of the case among the model's golden vectors.
        is_parallel: Whether the session is the one that computes on all threads.
    """

    model: "ref[LoadedModel]"
    case: int
    is_parallel: bool

    def session(self, model: LoadedModel) -> Session:
        """The session of the model, which also serves requests."""
        sessions = model.parallel_sessions if self.is_parallel else model.sessions
        return sessions[model.golden[self.case].graph]


def checks_of(model: LoadedModel) -> list[Check]:
    """Every golden case of a model, on each session that computes its graph."""
    return [
        Check(ref(model), index, is_parallel)
        for is_parallel, sessions in ((False, model.sessions), (True, model.parallel_sessions))
        for index, case in enumerate(model.golden)
        if case.graph in sessions
    ]


class CanarySchedule:
    """Spreads the checks of all models evenly over a period. Has no thread, lock or clock of its own.

    A check is due at a fixed interval after the last. While the engine is busy it waits, for one interval at
    most: then it runs anyway, so busy engines are checked too.
    """

    def __init__(self, seconds: float, now: float) -> None:
        """Begins a first period.

        Args:
            seconds: The period, above 0, in which every golden vector is replayed once.
            now: The current time, on any clock.
        """
        self._seconds = self._interval = seconds
        self._round = deque[Check]()
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


class Canary:
    """Replays golden vectors on a thread of its own, one at a time, on the sessions that serve requests.

    A result that misses its tolerance is repeated at once: damaged weights give the same result again, and a
    fault of one computation does not. If the repetition misses it too, the model is taken out of service.
    """

    def __init__(
        self,
        repository: Repository,
        load: Callable[[], EngineLoad],
        withdraw: Withdraw,
        metrics: CanaryMetrics,
        seconds: float,
    ) -> None:
        """Starts no thread yet.

        Args:
            repository: The models that are served.
            load: Returns the load of the engine.
            withdraw: Takes a model out of service.
            metrics: Receives every result.
            seconds: The time in which all golden vectors are replayed once; 0 for never.
        """
        self._repository, self._load, self._withdraw, self._metrics = repository, load, withdraw, metrics
        self._schedule = CanarySchedule(seconds, time.monotonic())
        self._is_on = seconds > 0
        self._thread = PeriodicThread("canary", self._look, lambda: self._schedule.delay(time.monotonic()))

    def start(self) -> None:
        """Begins to replay."""
        if self._is_on:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread after the replay that is under way."""
        self._thread.close()

    def _look(self) -> None:
        """Replays the next golden case if one is due."""
        load, started = self._load(), time.monotonic()
        is_idle = not load.queued_sequences and not load.running
        check = self._schedule.next(self._repository, started, is_idle=is_idle)
        if check is None:
            return
        try:
            self._replay(check)
        finally:
            now = time.monotonic()
            self._schedule.ended(now, now - started, was_idle=is_idle)

    def _replay(self, check: Check) -> None:
        if (model := check.model()) is None:
            return
        fields = {"model": model.name, "version": model.version}
        found = self._measure(model, check)
        if found is not None and found.ratio > 1:
            self._metrics.failed(model)
            log.warning("golden vectors missed", extra={**fields, "reason": found.reason})
            found = self._measure(model, check)
        if found is None:
            return
        self._metrics.replayed(model, check, found.ratio)
        if found.ratio > 1 and self._withdraw(model, found.reason):
            log.error("model taken out of service", extra={**fields, "reason": found.reason})

    def _measure(self, model: LoadedModel, check: Check) -> Parity | None:
        """Replays a golden case; None if it could not run now."""
        case, session = model.golden[check.case], check.session(model)
        try:
            return replay(case, session, model.manifest.tolerance, where="in service")
        except MemoryError:  # requests took it; the case is replayed again in the next period
            return None
        except Exception as error:
            log.error("golden vectors do not run", extra={"model": model.name}, exc_info=error)
            return Parity(math.inf, math.inf, f"graph {case.graph} does not run in service any more")
