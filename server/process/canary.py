"""Watches parity in service: replays golden vectors of the served models, and withdraws one that drifts."""

import logging
import math
import time
from collections.abc import Callable
from typing import TypeAlias

from attention_serving.artifact.golden import GoldenCase
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import Parity, replay
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.session import Session
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)
# Takes a model out of service, with the reason for callers; returns whether it was in service.
Withdraw = Callable[[LoadedModel, str], bool]
# Maximum fraction of the time that replays take.
MAX_TIME_FRACTION = 0.01
# One golden case of a model, on one of the sessions that also serve requests.
Check: TypeAlias = tuple[LoadedModel, GoldenCase, Session]


def checks_of(repository: Repository) -> list[Check]:
    """Every golden case of the models that are ready, on each session that computes its graph."""
    return [
        (model, case, sessions[case.graph])
        for model in repository.loaded_models
        for sessions in (model.sessions, model.parallel_sessions)
        for case in model.golden
        if case.graph in sessions
    ]


class Canary(PeriodicThread):
    """Replays golden vectors on a thread of its own, one after another, evenly over a period.

    A result that misses its tolerance is repeated at once: damaged weights give the same result again, and a
    fault of one computation does not. If the repetition misses it too, the model is taken out of service.
    """

    def __init__(self, repository: Repository, withdraw: Withdraw, metrics: Metrics, seconds: float) -> None:
        """The thread starts with `start`.

        Args:
            repository: The models that are served.
            withdraw: Takes a model out of service.
            metrics: Receives every result.
            seconds: The time in which all golden vectors are replayed once.
        """
        self._repository, self._withdraw, self._metrics = repository, withdraw, metrics
        self._period, self._replays = seconds, 0
        super().__init__("canary", self.replay_next, seconds=0)

    def replay_next(self) -> None:
        """Replays the next golden case."""
        checks, started = checks_of(self._repository), time.monotonic()
        self.seconds = self._period / max(len(checks), 1)
        if checks:
            self._replay(checks[self._replays % len(checks)])
            self._replays += 1
            self.seconds = max(self.seconds, (time.monotonic() - started) / MAX_TIME_FRACTION)

    def _replay(self, check: Check) -> None:
        model = check[0]
        key, fields = (model.name, model.version), {"model": model.name, "version": model.version}
        parity = _measure(check)
        if parity is not None and parity.ratio > 1:
            self._metrics.replay_missed(key)
            log.warning("golden vectors missed", extra={**fields, "reason": parity.reason})
            parity = _measure(check)
        if parity is None:
            return
        self._metrics.replayed(key, parity.ratio, time.time())
        if model not in self._repository:  # it was unloaded meanwhile
            self._metrics.replayed(key)
        elif parity.ratio > 1:
            self._withdraw(model, parity.reason)


def _measure(check: Check) -> Parity | None:
    """Replays a golden case; None if it could not run now."""
    model, case, session = check
    try:
        return replay(case, session, model.manifest, where="in service")
    except MemoryError:  # requests took it; the case is replayed again in the next period
        return None
    except Exception as error:
        log.error("golden vectors do not run", extra={"model": model.name}, exc_info=error)
        return Parity(math.inf, math.inf, f"graph {case.graph} does not run in service any more")
