"""Watches parity in service: replays golden vectors of the served models, and withdraws one that drifts."""

import logging
import math
import time
from collections.abc import Callable

from attention_serving.server.canary_metrics import CanaryMetrics
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.canary import CanarySchedule, Check
from attention_serving.server.engine.models.loading import Parity, replay
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.session import RunControl
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.periodic import PeriodicThread

log = logging.getLogger(__name__)
# Takes a model out of service, with the reason for callers; returns whether it was in service.
Withdraw = Callable[[LoadedModel, str], bool]


class Canary:
    """Replays golden vectors on a thread of its own, on the sessions that serve requests.

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
        self._repository = repository
        self._load = load
        self._withdraw = withdraw
        self._metrics = metrics
        self._schedule = CanarySchedule(seconds, time.monotonic())
        self._control = RunControl()
        self._is_on = seconds > 0
        self._thread = PeriodicThread("canary", self._look, lambda: self._schedule.delay(time.monotonic()))
        self._closing = False

    def start(self) -> None:
        """Begins to replay."""
        if self._is_on:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. A replay that is under way is ended early."""
        self._closing = True
        self._control.terminate()
        self._thread.close()

    def _look(self) -> None:
        """Replays the next golden case if one is due."""
        load = self._load()
        is_idle = not load.queued_sequences and not load.running
        started = time.monotonic()
        check = self._schedule.next(self._repository, started, is_idle=is_idle)
        if check is None:
            return
        try:
            # No longer than the call: a model that is unloaded must not be kept.
            if (model := check.model()) is not None:
                self._replay(model, check)
        finally:
            now = time.monotonic()
            self._schedule.ended(now, now - started, was_idle=is_idle)

    def _replay(self, model: LoadedModel, check: Check) -> None:
        found = self._measure(model, check)
        if found is not None and found.ratio > 1:
            self._metrics.failed(model)
            log.warning("golden vectors missed", extra=_fields(model, found))
            found = self._measure(model, check)
        if found is None:
            return
        self._metrics.replayed(model, check, found.ratio)
        if found.ratio > 1 and self._withdraw(model, found.reason):
            log.error("model taken out of service", extra=_fields(model, found))

    def _measure(self, model: LoadedModel, check: Check) -> Parity | None:
        """Replays a golden case; None if it could not run now."""
        case, session = model.golden[check.case], check.session(model)
        self._control = RunControl()
        if self._closing:
            return None
        try:
            return replay(case, session, model.manifest.tolerance, self._control, where="in service")
        except MemoryError:  # requests took it; the case is replayed again in the next period
            return None
        except Exception as error:
            if self._closing:
                return None
            log.error("golden vectors do not run", extra={"model": model.name}, exc_info=error)
            return Parity(math.inf, math.inf, f"graph {case.graph} does not run in service any more")


def _fields(model: LoadedModel, found: Parity) -> dict[str, object]:
    return {"model": model.name, "version": model.version, "reason": found.reason}
