"""Whether calls are traced, and how: the server's settings and OpenTelemetry's environment variables."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

DISABLED, EXPORTER, PROTOCOL = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SAMPLER, SAMPLER_ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
PARENT = "parentbased_"
# What the samplers of the specification do without a caller's decision; None takes the argument.
RATIOS: dict[str, float | None] = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How calls are traced.

    Attributes:
        endpoint: URL of the collector; empty leaves it to OpenTelemetry's variables.
        ratio: Share of the traces that begin here and are sampled, from 0 to 1.
        follows_parent: Whether the caller's decision is followed if it sent one.
        host: The address that the server listens on.
        port: The port; 0 if it is not known.
    """

    endpoint: str = ""
    ratio: float = 1.0
    follows_parent: bool = True
    host: str = ""
    port: int = 0


def trace_options(
    endpoint: str,
    *,
    host: str = "",
    port: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> TraceOptions | None:
    """The options of traces; None if nothing asks for them.

    Args:
        endpoint: The setting `trace_endpoint`, which precedes its variable; empty if it is not set.
        host: The address that the server listens on.
        port: The port; 0 if it is not known.
        environment: Environment variables.
    """
    if not _is_wanted(endpoint, environment):
        return None
    ratio, follows_parent = _sampler(environment)
    return TraceOptions(endpoint=endpoint, ratio=ratio, follows_parent=follows_parent, host=host, port=port)


def _is_wanted(endpoint: str, environment: Mapping[str, str]) -> bool:
    if environment.get(DISABLED, "").strip().lower() == "true":
        return False
    if endpoint:
        return True
    exporters = {name.strip() for name in environment.get(EXPORTER, "").split(",")} - {""}
    if "none" in exporters or (exporters and "otlp" not in exporters):
        return False
    wanted = bool(exporters) or any(environment.get(name) for name in ENDPOINTS)
    if wanted and environment.get(PROTOCOL, "grpc") != "grpc":
        log.warning("traces are exported with grpc", extra={PROTOCOL: environment[PROTOCOL]})
    return wanted


def _sampler(environment: Mapping[str, str]) -> tuple[float, bool]:
    """The ratio, and whether the caller's decision is followed. What is not valid means the default."""
    name = environment.get(SAMPLER, "").strip().lower() or f"{PARENT}always_on"
    kind = name.removeprefix(PARENT)
    if kind not in RATIOS:
        log.warning("unknown sampler, all traces are sampled", extra={SAMPLER: name})
        return 1.0, True
    ratio = RATIOS[kind]
    return _argument(environment) if ratio is None else ratio, name.startswith(PARENT)


def _argument(environment: Mapping[str, str]) -> float:
    given = environment.get(SAMPLER_ARGUMENT, "").strip() or "1"
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        log.warning("not a ratio from 0 to 1, all traces are sampled", extra={SAMPLER_ARGUMENT: given})
        return 1.0
    return ratio
