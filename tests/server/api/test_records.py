"""What the log, the traces and the engine's observer are told of requests, by a real server."""

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, InvalidArgumentError, NotFoundError

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.observe.records import REQUEST_ID, sent_request_id
from attention_serving.server.security.guard import Guard
from scripts.local_server import serving
from tests.server.api.messages import attend_request, raw_request
from tests.server.api.served import ATTEND, STREAM, OpenStream, attend, bearer
from tests.server.http.clients import ask
from tests.server.samples import SELF, TEXT
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Gate, Served, costing, tapped
from tests.support.collector import QUICKLY, Collector, collecting

STAGES = ("decode", "queue", "run", "encode")
SHARED = 3
SENTINEL, SECRET, VALUE = "quixotic zephyr", "token-that-nobody-may-see", 0.123456789


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Restores the level that the log of requests sets."""
    logger = logging.getLogger("attention_serving.server.requests")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        for name, value in (QUICKLY | {"OTEL_EXPORTER_OTLP_ENDPOINT": found.url}).items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def recorder(collector: Collector) -> Iterator[Recorder]:  # noqa: ARG001 - it is told of the spans
    """Writes all lines, and exports all spans."""
    found = Recorder("all", host="h", port=9)
    yield found
    found.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(line) for line in caplog.records if line.name == "attention_serving.server.requests"]


def test_a_request_has_a_line_and_a_span_with_its_size_stages_and_code(
    self_model: LoadedModel,
    guard: Guard,
    recorder: Recorder,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = attend_request([2, 5])
    named = (("x-request-id", "mine"), ("traceparent", f"00-{7:032x}-{9:016x}-01"), *bearer("all-token"))
    with Served(self_model, guard=guard, recorder=recorder) as served:
        stub = AttentionServiceStub(served.channel)
        answered = stub.Attend.future(request, timeout=PATIENCE_SECONDS, metadata=named)
        assert dict(answered.trailing_metadata())[REQUEST_ID] == "mine"
        served.calls.ended(1)
        (call,) = collector.wait_for(ATTEND[1:])
    (line,) = lines(caplog)
    assert (line["msg"], line["code"], "reason" in line) == ("request", "OK", False)
    assert (line["request_id"], line["method"], line["caller"]) == ("mine", ATTEND[1:], "token:all")
    assert (line["model"], line["version"], line["sequences"], line["rows"]) == (SELF, "1", 2, 7)
    assert line["trace_id"] == call.trace_id == f"{7:032x}"
    assert (line["bytes_in"], line["bytes_out"] > 7 * 4) == (request.ByteSize(), True)
    assert 0 < sum(line[f"{stage}_ms"] for stage in STAGES) <= line["total_ms"] + 0.01

    assert (call.kind, call.is_error, call.parent_id) == (2, False, f"{9:016x}")  # kind 2 is SERVER
    assert call.attributes == {
        "attention.request_id": "mine",
        "rpc.system.name": "grpc",
        "rpc.method": ATTEND[1:],
        "rpc.response.status_code": "OK",
        "server.address": "h",
        "server.port": 9,
        "attention.model": SELF,
        "attention.version": "1",
        "attention.sequences": 2,
        "attention.rows": 7,
    }
    stages = collector.children(call)
    assert {stage.name for stage in stages} == set(STAGES)
    assert all(call.start <= stage.start <= stage.end <= call.end for stage in stages)
    runs = [stage.attributes for stage in stages if stage.name == "run"]
    assert sum(run["attention.rows"] for run in runs) == 7
    assert {run["attention.precision"] for run in runs} == {"fp32"}
    assert all(0 <= run["attention.padding_share"] < 1 for run in runs)


def test_each_request_of_a_stream_has_a_line_and_a_span_and_so_has_the_stream(
    self_model: LoadedModel, recorder: Recorder, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with Served(self_model, recorder=recorder) as served:
        stream = OpenStream(served.channel)
        for rows, model in ((1, ""), (1, "nobody"), (2, ""), (3, "")):
            stream.send("", rows, model=model)
        stream.end()
        assert [bool(reply.error.reason) for reply in stream.replies] == [False, True, False, False]
        (call,) = collector.wait_for(STREAM[1:])
    *each, whole = lines(caplog)
    assert [line["msg"] for line in (*each, whole)] == [*["request"] * 4, "stream"]
    assert sorted(line["code"] for line in each) == ["NOT_FOUND", "OK", "OK", "OK"]
    assert sorted(line["rows"] for line in each if line["code"] == "OK") == [1, 2, 3]
    assert {line["reason"] for line in each if line["code"] != "OK"} == {"MODEL_NOT_FOUND"}
    assert (whole["code"], whole["requests"]) == ("OK", 4)
    for size in ("bytes_in", "bytes_out"):
        assert whole[size] == sum(line[size] for line in each)
    assert {line["request_id"] for line in each} == {whole["request_id"]}

    requests = collector.wait_for("request", 4)
    assert call.attributes["attention.requests"] == 4
    assert {(request.trace_id, request.parent_id) for request in requests} == {call.reference}
    codes = [request.attributes["rpc.response.status_code"] for request in requests]
    assert sorted(codes) == ["NOT_FOUND", "OK", "OK", "OK"]


def test_a_shared_run_is_one_span(self_model: LoadedModel, recorder: Recorder, collector: Collector) -> None:
    gate = Gate()
    held = tapped(costing(self_model, SAME_FOR_ALL), gate)
    with Served(held, recorder=recorder, max_concurrent_calls=SHARED + 1) as served:
        stub = AttentionServiceStub(served.channel)
        # Without deadlines: each run is taken to cost a second.
        first = stub.Attend.future(attend_request([1]))
        assert gate.entered.wait(PATIENCE_SECONDS)
        calls = [stub.Attend.future(attend_request([3])) for _ in range(SHARED)]
        assert served.engine.has_queued(1 + SHARED)
        gate.open()
        assert [call.code() for call in (first, *calls)] == [grpc.StatusCode.OK] * (1 + SHARED)
        spans = collector.wait_for(ATTEND[1:], SHARED + 1)
    (run,) = [own for own in collector.named("run") if own.attributes["attention.sequences"] == SHARED]
    sharing = {span.reference for span in spans if run.reference in span.links}
    assert sharing == set(run.links)
    assert len(sharing) == SHARED


def test_failed_requests_name_their_model(self_model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with Served(self_model, limits=Limits(max_sequence_length=4), recorder=Recorder("failed")) as served:
        typed, open_inference = AttentionServiceStub(served.channel), GRPCInferenceServiceStub(served.channel)
        assert attend(served.channel).code() is grpc.StatusCode.OK
        failing = [
            attend(served.channel, 5),
            typed.Attend.future(pb.AttendRequest(model_name=SELF)),
            open_inference.ModelInfer.future(raw_request(self_model, {})),
            typed.Attend.future(pb.AttendRequest(model_name="unknown")),
        ]
        ids = {dict(call.trailing_metadata())[REQUEST_ID] for call in failing}
        served.calls.ended(5)
        recorder = served.engine.recorder
    assert {line["request_id"] for line in lines(caplog)} == ids
    found = [(line["code"], line.get("model")) for line in lines(caplog)]
    assert sorted(found, key=str) == [("INVALID_ARGUMENT", SELF)] * 3 + [("NOT_FOUND", None)]
    # A request to an unknown model belongs to none.
    assert (recorder.answered, recorder.failed) == ([SELF], [(SELF, "INVALID_ARGUMENT")] * 3)


@pytest.mark.parametrize("given", ["a" * 128, "a" * 129, "two words"], ids=["longest", "too long", "spaces"])
def test_an_identifier_is_taken_if_it_is_sane(given: str) -> None:
    is_sane = given == "a" * 128
    assert sent_request_id(((REQUEST_ID, given),)) == (given if is_sane else "")


@pytest.mark.thorough
def test_neither_content_nor_secrets_are_logged(artifacts: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--log-requests=all", "--log-level=DEBUG", "--http-port=0")
    with serving(artifacts, log, *options) as server:
        query = np.full((3, 4), VALUE, np.float32)
        metadata: dict[str, str | bytes] = {"secret-bin": SECRET.encode(), "x-api-key": SECRET}
        with AttentionClient(server.target, token=SECRET, metadata=metadata) as client:
            client.attend(SELF, query)
            with suppress(InvalidArgumentError):  # the model need not know the words
                client.attend_text(TEXT, SENTINEL)
            list(client.attend_stream(SELF, [query, query]))
            with pytest.raises(NotFoundError) as caught:
                client.attend(SENTINEL, query)
            with pytest.raises(ValueError, match="query"):
                client.attend(SELF, np.full((3, 5), VALUE, np.float32))
        port, headers = server.http_port, {"authorization": f"Bearer {SECRET}", "x-request-id": "over-http"}
        text = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [SENTINEL]}]}
        answer = ask(port, f"/v2/models/{TEXT}/infer?{SENTINEL.split(maxsplit=1)[0]}", text, headers)
        assert ask(port, f"/v2/models/{SELF}/infer", {"inputs": SENTINEL}, headers).status == 400
        assert server.stop() == 0
    assert answer.headers["x-request-id"] == "over-http"
    written = log.read_text()
    for secret in (*SENTINEL.split(), SECRET, str(VALUE), str(float(np.float32(VALUE)))):
        assert secret not in written
    requests = re.findall(r" INFO request request_id=(\S+)", written)
    assert len(requests) >= 7
    assert caught.value.request_id in requests
    assert requests.count("over-http") == 1
    assert len(re.findall(r" INFO http request request_id=over-http", written)) == 2
