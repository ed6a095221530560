"""What switches traces on."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from attention_serving.server.observe.logs import Recorder, are_traces_on
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
    assert not are_traces_on(environment)


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
    assert are_traces_on(environment)


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys\n"
        "from attention_serving.server import application\n"
        "from attention_serving.server.observe.logs import Recorder\n"
        "from attention_serving.server.http import app as http\n"
        "assert Recorder('all').is_on\n"
        "print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


class Broken:
    """Traces that fail at every step."""

    def skips(self, _metadata: object) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., object]:
        def step(*_arguments: object) -> object:
            raise RuntimeError(name)

        return step


def test_a_fault_of_the_traces_breaks_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("none")
    monkeypatch.setattr(recorder, "_traces", Broken())
    call = SimpleNamespace(method="/a/B", metadata=())
    is_stream = True
    assert recorder(call, is_stream) is None  # type: ignore[arg-type]
    scope = {"method": "GET", "path": "/", "scheme": "http", "headers": []}
    recorder.http_ended(recorder.http_request(scope, "/"), 200)
