"""Traces of real processes, read back from a collector: from the client through the server to the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT, serving
from tests.server.http.clients import ask, http_port
from tests.server.samples import SELF
from tests.support.collector import QUICKLY, Collector, Seen, collecting

ATTEND = "attention.v1.AttentionService/Attend"
STREAM = "attention.v1.AttentionService/AttendStream"
INFER = "inference.GRPCInferenceService/ModelInfer"
BODY = {"inputs": [{"name": "query", "shape": [1, 2, 4], "datatype": "FP32", "data": [0.5] * 8}]}
# An application that traces: it sets a provider, and then uses the client as any other does.
APPLICATION = """
import sys
import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from attention_client import AttentionClient

target, collector, model = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector)))
trace.set_tracer_provider(provider)
query = np.ones((3, 4), np.float32)
with AttentionClient(target) as client, trace.get_tracer("app").start_as_current_span("application"):
    client.attend(model, query)
    assert len(list(client.attend_stream(model, [query] * 2))) == 2
provider.shutdown()
"""


def run_application(target: str, collector: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "clients/python/src")}
    command = [sys.executable, "-c", APPLICATION, target, collector, SELF]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)


def below(collector: Collector, span: Seen, name: str) -> Seen:
    found = [child for child in collector.children(span) if child.name == name]
    assert found, (name, [child.name for child in collector.children(span)])
    return found[0]


def test_a_trace_leads_from_the_client_through_the_server_to_the_run(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        for name, value in (QUICKLY | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}).items():
            monkeypatch.setenv(name, value)
        with serving(artifacts, tmp_path / "log", "--http-port=0") as server:
            run_application(server.target, collector.url)
            collector.wait_for(ATTEND, 2)  # the span of the client and that of the server
            collector.wait_for(STREAM, 2)
            (root,) = collector.wait_for("application")
            parent = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
            assert ask(http_port(server.log), f"/v2/models/{SELF}/infer", BODY, parent).status == 200
            collector.wait_for(INFER)
            assert server.stop() == 0
    sent = below(collector, root, ATTEND)
    received = below(collector, sent, ATTEND)
    assert (sent.kind, received.kind) == (3, 2)  # CLIENT, SERVER
    assert received.has_remote_parent
    run = below(collector, received, "run")
    assert sent.start <= received.start <= run.start <= run.end <= received.end
    assert (sent.attributes["rpc.response.status_code"], sent.attributes["server.port"]) == (
        "OK",
        server.port,
    )
    stream = below(collector, below(collector, root, STREAM), STREAM)
    assert [child.name for child in collector.children(stream)] == ["request"] * 2
    (called,) = collector.named(INFER)
    assert (called.trace_id, called.parent_id) == (f"{7:032x}", f"{9:016x}")
    assert below(collector, called, "run").attributes["attention.model"] == SELF
