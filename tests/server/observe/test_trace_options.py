"""What switches traces on."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from attention_serving.server.observe.request_log import Recorder, TraceOptions, trace_options
from tests.server.samples import ROOT

URL = "http://127.0.0.1:4317"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "attention", "OTEL_TRACES_SAMPLER": "always_on"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": " True "},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none, otlp"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_traces_are_off(environment: dict[str, str]) -> None:
    assert trace_options("", environment=environment) is None


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
    assert trace_options("", environment=environment) == TraceOptions()


def test_the_setting_switches_traces_on_unless_the_sdk_is_disabled() -> None:
    assert trace_options(URL, environment={}) == TraceOptions(endpoint=URL)
    assert trace_options(URL, environment={"OTEL_SDK_DISABLED": "true"}) is None


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, pathlib\n"
        "from attention_serving.server import application\n"
        "from attention_serving.server.observe.request_log import recorder_of\n"
        "from attention_serving.server.http import app as http\n"
        "from attention_serving.server.settings import Settings\n"
        "settings = Settings(model_repository=pathlib.Path('.'), log_requests='all')\n"
        "assert recorder_of(settings) is not None\n"
        "print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


class Broken:
    """Traces that fail at every step."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        def step(*_arguments: object) -> object:
            raise RuntimeError(name)

        return step


def test_a_fault_of_the_traces_breaks_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("none", TraceOptions(endpoint="http://127.0.0.1:1"))
    recorder.close()
    monkeypatch.setattr(recorder, "_traces", Broken())
    call = SimpleNamespace(method="/a/B", metadata=())
    is_stream = True
    assert recorder(call, is_stream) is None  # type: ignore[arg-type]
    scope = {"method": "GET", "path": "/", "scheme": "http", "headers": []}
    recorder.http_ended(recorder.http_request(scope, "/"), 200)
