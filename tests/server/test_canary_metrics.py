"""Metrics of parity in service: published while a model is loaded, in one process or several."""

import dataclasses
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, values

from attention_serving.server.canary import Check, checks_of
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.observe.metrics import CanaryMetrics, Metrics
from attention_serving.server.observe.prometheus import FOLDER_VARIABLE, worker_registry, write_metrics_to
from tests.server.samples import SELF
from tests.support.prometheus import published

RATIO, REPLAYED_AT = "attention_canary_error_ratio", "attention_canary_last_replay_timestamp_seconds"
# What is published of a model without replays, or that is not loaded.
NOTHING = (0.0, float("inf"))
LABELS = frozenset({("model", SELF), ("version", "1")})


@pytest.fixture
def checks(self_model: LoadedModel) -> list[Check]:
    return checks_of(self_model)


def served(model: LoadedModel) -> tuple[CanaryMetrics, CollectorRegistry]:
    metrics = Metrics()
    metrics.canary.loaded(Repository([model]))
    return metrics.canary, metrics.registry


def gauges(registry: CollectorRegistry) -> tuple[float, float]:
    """The ratio, and the time of the latest replay."""
    samples = published(registry)
    return samples[RATIO, LABELS], samples[REPLAYED_AT, LABELS]


def test_the_ratio_is_the_largest_of_the_latest_of_each_check(
    self_model: LoadedModel, checks: list[Check]
) -> None:
    metrics, registry = served(self_model)
    assert gauges(registry) == NOTHING
    assert published(registry)["attention_canary_failures_total", LABELS] == 0
    ratios = []
    for check, ratio in ((checks[0], 0.5), (checks[1], 0.25), (checks[0], 0.125), (checks[1], 2.0)):
        metrics.replayed(self_model, check, ratio)
        ratios.append(gauges(registry)[0])
    assert ratios == [0.5, 0.5, 0.25, 2.0]
    metrics.loaded(Repository([self_model, FailedModel("other", "1", "")]))
    assert gauges(registry)[0] == 2.0


def test_gauges_last_until_the_model_is_unloaded_or_loaded_again(
    self_model: LoadedModel, checks: list[Check]
) -> None:
    metrics, registry = served(self_model)
    metrics.replayed(self_model, checks[0], 3.0)
    metrics.failed(self_model)
    metrics.loaded(Repository([FailedModel(SELF, "1", "drift", is_withdrawn=True)]))
    assert gauges(registry)[0] == 3.0
    again = dataclasses.replace(self_model)
    metrics.loaded(Repository([again]))
    assert gauges(registry) == NOTHING
    metrics.replayed(self_model, checks[0], 3.0)  # of the model that was replaced
    assert gauges(registry) == NOTHING
    for after in ([], [FailedModel(SELF, "1", "damaged")]):
        metrics.loaded(Repository([again]))
        metrics.replayed(again, checks_of(again)[0], 0.5)
        assert gauges(registry)[0] == 0.5
        metrics.loaded(Repository(after))
        assert gauges(registry) == NOTHING
    assert published(registry)["attention_canary_failures_total", LABELS] == 1


def test_several_workers_show_the_worst_and_nothing_once_all_have_unloaded(
    self_model: LoadedModel, checks: list[Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    together = worker_registry(tmp_path)
    workers = []
    for worker, ratio in enumerate([0.25, 0.5]):
        write_metrics_to(tmp_path, worker)
        metrics, _ = served(self_model)
        metrics.replayed(self_model, checks[0], ratio)
        workers.append(metrics)
    both = gauges(together)
    workers[1].loaded(Repository([]))
    one = gauges(together)
    workers[0].loaded(Repository([]))
    assert gauges(together) == NOTHING
    for worker, ratio in ((1, 0.75), (0, 0.5)):
        workers[worker].loaded(Repository([self_model]))
        workers[worker].replayed(self_model, checks[0], ratio)
    again = gauges(together)
    assert (both[0], one[0], again[0]) == (0.5, 0.25, 0.75)
    assert both[1] == one[1] < again[1]  # the oldest
