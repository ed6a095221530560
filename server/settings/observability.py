"""Options of traces and of the log of requests."""

from typing import Literal

from pydantic import BaseModel, Field


class Observability(BaseModel):
    """Which requests are traced and logged."""

    log_requests: Literal["all", "failed", "none"] = Field(
        "none",
        description="Requests that have a line in the log, with their size, stages and code, whatever"
        " log_level is: all, failed or none.",
    )
    trace_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^/\s]+/?)?$",
        description="URL of an OpenTelemetry collector that traces are exported to with OTLP over gRPC, such"
        " as http://127.0.0.1:4317. Traces are off without it, unless OTEL_EXPORTER_OTLP_ENDPOINT is set.",
    )
    trace_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the calls that are traced, 0 to 1. A caller that sends a trace context decides"
        " for its call. Without it OTEL_TRACES_SAMPLER decides, and all are traced if that is not set.",
    )
