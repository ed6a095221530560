"""Options of traces and of the log of requests."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator


class Observability(BaseModel):
    """Which requests are traced and logged."""

    log_requests: Literal["all", "failed", "none"] = Field(
        "none",
        description="Requests that have a line in the log, with their size, stages and code, whatever"
        " log_level is: all, failed or none.",
    )
    trace_endpoint: str = Field(
        "",
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

    @field_validator("trace_endpoint")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and not (parts.scheme in ("http", "https") and parts.netloc):
            raise ValueError("must be a URL with http or https")
        return value
