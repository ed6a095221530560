"""A trace of a real server, read back from a collector: from an HTTP caller through both processes to a run.

clients/python/tests/test_client_spans.py has the client's spans, tests/server/api/test_records.py those of a
server.
"""

from pathlib import Path

import pytest

from scripts.local_server import serving
from tests.server.http.clients import ask
from tests.server.samples import SELF
from tests.support.collector import QUICKLY, collecting

INFER = "inference.GRPCInferenceService/ModelInfer"
BODY = {"inputs": [{"name": "query", "shape": [1, 2, 4], "datatype": "FP32", "data": [0.5] * 8}]}


def test_a_trace_leads_from_the_caller_through_the_server_to_the_run(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        for name, value in (QUICKLY | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}).items():
            monkeypatch.setenv(name, value)
        with serving(artifacts, tmp_path / "log", "--http-port=0") as server:
            parent = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
            assert ask(server.http_port, f"/v2/models/{SELF}/infer", BODY, parent).status == 200
            (called,) = collector.wait_for(INFER)
            assert server.stop() == 0
    assert (called.trace_id, called.parent_id, called.has_remote_parent) == (f"{7:032x}", f"{9:016x}", True)
    (run,) = [span for span in collector.children(called) if span.name == "run"]
    assert run.attributes["attention.model"] == SELF
