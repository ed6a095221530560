"""Metrics that state what the server is built of, and what it holds at most."""

import platform
from importlib.metadata import distributions
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ByteSize

from attention_serving.server import VERSION
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.fixed_metrics import UNKNOWN, publish_fixed_metrics
from attention_serving.server.settings import Settings
from tests.server.test_metrics import Samples, published, value


def fixed(**options: object) -> Samples:
    registry = CollectorRegistry()
    publish_fixed_metrics(registry, Settings.model_validate({"model_repository": Path(), **options}))
    return published(registry)


def build_labels(samples: Samples) -> dict[str, str]:
    (labels,) = [labels for name, labels in samples if name == "attention_build_info"]
    return dict(labels)


@pytest.mark.parametrize("provider", Provider, ids=str)
def test_the_build_is_described(provider: Provider) -> None:
    """One of the two runtimes is installed, never both."""
    installed = {each.name: each.version for each in distributions()}
    samples = fixed(provider=provider)
    labels = build_labels(samples)
    assert labels == {
        "version": VERSION,
        "provider": provider.runtime.name,
        "onnxruntime": installed.get(provider.runtime.package, UNKNOWN),
        "grpcio": installed["grpcio"],
        "python": platform.python_version(),
    }
    assert value(samples, "attention_build_info", **labels) == 1


@pytest.mark.parametrize(
    ("metric", "option", "given", "expected"),
    [
        ("attention_open_calls_limit", "max_concurrent_calls", 7, 7),
        ("attention_open_connections_limit", "max_connections", 9, 9),
        ("attention_batch_sequences_limit", "max_batch_sequences", 5, 5),
        ("attention_in_flight_limit_bytes", "max_in_flight_bytes", ByteSize(8 * MIB), 8 * MIB),
        ("attention_run_memory_limit_bytes", "max_memory", ByteSize(80 * MIB), 60 * MIB),
    ],
)
def test_the_limits_are_those_of_the_settings(
    metric: str, option: str, given: object, expected: float
) -> None:
    assert value(fixed(**{option: given}), metric) == expected
