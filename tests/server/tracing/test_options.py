"""What switches traces on, and how calls are sampled then."""

import logging
import subprocess
import sys

import pytest

from attention_serving.server.tracing.options import TraceOptions, trace_options
from tests.server.samples import ROOT

URL = "http://127.0.0.1:4317"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}


def options(environment: dict[str, str] | None = None, *, endpoint: str = "") -> TraceOptions | None:
    return trace_options(endpoint, environment=environment or {})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "attention", "OTEL_TRACES_SAMPLER": "always_on"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": " True "},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_traces_are_off(environment: dict[str, str]) -> None:
    assert options(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        ENDPOINT,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "false"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "console, otlp"},
    ],
)
def test_a_variable_switches_traces_on(environment: dict[str, str]) -> None:
    assert options(environment) == TraceOptions()


def test_the_setting_switches_traces_on_unless_the_sdk_is_disabled() -> None:
    assert options(endpoint=URL) == TraceOptions(endpoint=URL)
    assert options({"OTEL_SDK_DISABLED": "true"}, endpoint=URL) is None


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio", "follows"),
    [
        ("", "", 1.0, True),
        ("always_on", "0.5", 1.0, False),
        ("always_off", "", 0.0, False),
        ("traceidratio", "0.5", 0.5, False),
        ("traceidratio", "", 1.0, False),
        ("parentbased_always_on", "", 1.0, True),
        ("parentbased_always_off", "", 0.0, True),
        ("parentbased_traceidratio", "0.5", 0.5, True),
        ("Parentbased_TraceIdRatio", "0.5", 0.5, True),
    ],
)
def test_the_samplers_of_the_specification(sampler: str, argument: str, ratio: float, follows: bool) -> None:
    found = options({**ENDPOINT, "OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert found == TraceOptions(ratio=ratio, follows_parent=follows)


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_SAMPLER": "sometimes"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_what_is_not_valid_is_reported(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = options({**ENDPOINT, **environment})
    assert found is not None
    assert found.ratio == 1
    assert len(caplog.records) == 1


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, pathlib\n"
        "from attention_serving.server import application\n"
        "from attention_serving.server.recorder import call_recorder\n"
        "from attention_serving.server.http import app as http\n"
        "from attention_serving.server.settings import Settings\n"
        "settings = Settings(model_repository=pathlib.Path('.'), log_requests='all')\n"
        "assert call_recorder(settings) is not None\n"
        "print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
