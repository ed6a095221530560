"""Metrics that do not change while the server runs: what it is built of, and what it holds at most."""

import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server import VERSION
from attention_serving.server.metrics import AmongWorkers
from attention_serving.server.settings import Settings

UNKNOWN = "unknown"


def publish_fixed_metrics(registry: CollectorRegistry, settings: Settings) -> None:
    """Adds the metrics to a registry, with their values."""
    _publish_build(registry, settings)
    limits = settings.limits
    _publish(
        registry,
        "attention_open_calls_limit",
        "Most inference calls that are in progress at a time: max_concurrent_calls of all workers.",
        settings.max_concurrent_calls,
    )
    _publish(
        registry,
        "attention_open_connections_limit",
        "Most connections: max_connections of all workers.",
        settings.max_connections,
    )
    _publish(
        registry,
        "attention_in_flight_limit_bytes",
        "Most memory that requests may hold, in bytes: max_in_flight_bytes of all workers.",
        limits.max_in_flight_bytes,
    )
    _publish(
        registry,
        "attention_run_memory_limit_bytes",
        "Most memory that runs may be expected to take, in bytes: the rest of max_memory, of all workers.",
        limits.max_run_bytes,
    )
    _publish(
        registry,
        "attention_batch_sequences_limit",
        "Most sequences of one run: max_batch_sequences.",
        limits.max_batch_sequences,
        "livemax",
    )


def _publish(
    registry: CollectorRegistry, name: str, text: str, value: float, among_workers: AmongWorkers = "livesum"
) -> None:
    Gauge(name, text, registry=registry, multiprocess_mode=among_workers).set(value)


def _publish_build(registry: CollectorRegistry, settings: Settings) -> None:
    runtime = settings.device.provider.runtime
    labels = {
        "version": VERSION,
        "provider": runtime.name,
        "onnxruntime": _installed(runtime.package),
        "grpcio": _installed("grpcio"),
        "python": platform.python_version(),
    }
    build = Gauge(
        "attention_build_info",
        "Always 1; the labels are the versions of the server and its libraries, and the execution provider.",
        list(labels),
        registry=registry,
        multiprocess_mode="livemax",
    )
    build.labels(**labels).set(1)


def _installed(package: str) -> str:
    """The version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:  # ONNX Runtime can be built under another name
        return UNKNOWN
