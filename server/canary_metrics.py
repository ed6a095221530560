"""Metrics of parity in service: the error of each model in units of its tolerance, and its age."""

import threading
import time
from collections.abc import Hashable
from typing import NamedTuple
from weakref import ref

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Key, Repository
from attention_serving.server.observe.prometheus import forget

LABELS = ["model", "version"]


class _Watched(NamedTuple):
    """A model, and the latest result of each of its checks."""

    model: "ref[LoadedModel]"
    ratios: dict[Hashable, float]


class CanaryMetrics:
    """The gauges of a model exist while it is loaded, from its first replay on.

    They stay if it is taken out of service, so that an alert can be seen, until it is loaded again.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ratio = Gauge(
            "attention_canary_error_ratio",
            "Largest difference from eager PyTorch in the latest replay of the golden vectors, divided by the"
            " tolerance; above 1 the model is taken out of service. Of the worker where it is largest.",
            LABELS,
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._replayed_at = Gauge(
            "attention_canary_last_replay_timestamp_seconds",
            "Unix time of the latest replay of golden vectors, in seconds; of the worker where it is oldest.",
            LABELS,
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._failures = Counter(
            "attention_canary_failures",
            "Number of golden vectors that missed the tolerance in service, the repetition not counted.",
            LABELS,
            registry=registry,
        )
        self._lock = threading.Lock()
        self._watched: dict[Key, _Watched] = {}

    def loaded(self, repository: Repository) -> None:
        """Removes what was published of models that are not loaded any more, or that were loaded again."""
        models = {(model.name, model.version): model for model in repository}
        with self._lock:
            for key, watched in list(self._watched.items()):
                model = models.get(key)
                is_withdrawn = isinstance(model, FailedModel) and model.is_withdrawn
                if not is_withdrawn and (model is None or watched.model() is not model):
                    del self._watched[key]
                    for gauge in (self._ratio, self._replayed_at) if watched.ratios else ():
                        forget(gauge, *key)
            for key, model in models.items():
                if isinstance(model, LoadedModel) and key not in self._watched:
                    self._watched[key] = _Watched(ref(model), {})
                    self._failures.labels(*key)

    def replayed(self, model: LoadedModel, check: Hashable, ratio: float) -> None:
        """Publishes a result.

        Args:
            model: The model. Nothing is published if it was unloaded meanwhile.
            check: What was replayed.
            ratio: The part of the tolerance that is used.
        """
        key = model.name, model.version
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None and watched.model() is model:
                watched.ratios[check] = ratio
                self._ratio.labels(*key).set(max(watched.ratios.values()))
                self._replayed_at.labels(*key).set(time.time())

    def failed(self, model: LoadedModel) -> None:
        """Counts a golden vector that missed the tolerance."""
        self._failures.labels(model.name, model.version).inc()
