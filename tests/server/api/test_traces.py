"""Spans of calls, from a real server to a real collector."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.observe.logs import Recorder
from tests.server.api.messages import attend_request
from tests.server.samples import SELF
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Gate, Served, costing, tapped
from tests.support.collector import QUICKLY, Collector, Seen, collecting

ATTEND = "attention.v1.AttentionService/Attend"
STREAM = "attention.v1.AttentionService/AttendStream"
STAGES = ["decode", "queue", "run", "encode"]
SHARED = 32


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)
    with collecting() as found:
        yield found


@contextmanager
def recorder(collector: Collector) -> Iterator[Recorder]:
    with patch.dict(os.environ, {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}):
        found = Recorder("none", host="h", port=9)
    try:
        yield found
    finally:
        found.close()


def nested(outer: Seen, inner: Seen) -> bool:
    return outer.start <= inner.start <= inner.end <= outer.end


def test_a_call_has_a_span_with_its_stages(self_model: LoadedModel, collector: Collector) -> None:
    with recorder(collector) as calls, Served(self_model, recorder=calls) as served:
        named = (("x-request-id", "mine"),)
        AttentionServiceStub(served.channel).Attend(
            attend_request([2, 5]), timeout=PATIENCE_SECONDS, metadata=named
        )
        (call,) = collector.wait_for(ATTEND)
    assert call.parent_id == ""
    assert call.kind == 2  # SERVER
    assert not call.is_error
    assert call.attributes == {
        "attention.request_id": "mine",
        "rpc.system.name": "grpc",
        "rpc.method": ATTEND,
        "rpc.response.status_code": "OK",
        "server.address": "h",
        "server.port": 9,
        "attention.model": SELF,
        "attention.version": "1",
        "attention.sequences": 2,
        "attention.rows": 7,
    }
    assert call.resource["service.name"] == "attention-serving"
    stages = collector.children(call)
    assert sorted({stage.name for stage in stages}) == sorted(STAGES)
    assert all(nested(call, stage) for stage in stages)
    runs = [stage for stage in stages if stage.name == "run"]
    assert sum(run.attributes["attention.rows"] for run in runs) == 7
    assert {run.attributes["attention.precision"] for run in runs} == {"fp32"}
    assert all(0 <= run.attributes["attention.padding_share"] < 1 for run in runs)
    assert all(run.links == () for run in runs)


def test_a_run_that_requests_share_is_one_span_linked_to_all_of_them(
    self_model: LoadedModel, collector: Collector
) -> None:
    gate = Gate()
    held = tapped(costing(self_model, SAME_FOR_ALL), gate)
    with (
        recorder(collector) as calls,
        Served(held, recorder=calls, max_concurrent_calls=SHARED + 1) as served,
    ):
        attend = AttentionServiceStub(served.channel).Attend
        # Without deadlines: each run is taken to cost a second.
        first = attend.future(attend_request([1]))
        assert gate.entered.wait(PATIENCE_SECONDS)
        assert served.engine.has_queued(1)
        others = [attend.future(attend_request([3])) for _ in range(SHARED)]
        assert served.engine.has_queued(SHARED)
        gate.open()
        for each in (first, *others):
            each.result(PATIENCE_SECONDS)
        spans = collector.wait_for(ATTEND, SHARED + 1)
    shared = [run for run in collector.named("run") if run.attributes["attention.sequences"] == SHARED]
    assert len(shared) == 1
    (run,) = shared
    sharing = [span for span in spans if run.reference in span.links]
    assert len(sharing) == SHARED
    assert {span.reference for span in sharing} == set(run.links)
    assert (run.trace_id, run.parent_id) in run.links
    assert len({span.trace_id for span in sharing}) == SHARED
    assert run.attributes["attention.rows"] == 3 * SHARED
    assert len(collector.named("run")) == 2


def test_requests_of_a_stream_have_spans_of_their_own(self_model: LoadedModel, collector: Collector) -> None:
    bad = pb.AttendStreamRequest(id="bad", request=pb.AttendRequest(model_name="nobody"))
    with recorder(collector) as calls, Served(self_model, recorder=calls) as served:
        stream = AttentionServiceStub(served.channel).AttendStream
        good = [pb.AttendStreamRequest(id=str(i), request=attend_request([i + 1])) for i in range(3)]
        answers = list(stream(iter([good[0], bad, *good[1:]]), timeout=PATIENCE_SECONDS))
        assert [answer.WhichOneof("result") for answer in answers] == [
            "response",
            "error",
            "response",
            "response",
        ]
        (call,) = collector.wait_for(STREAM)
    requests = collector.wait_for("request", 4)
    assert call.attributes["attention.requests"] == 4
    assert {request.parent_id for request in requests} == {call.span_id}
    assert {request.trace_id for request in requests} == {call.trace_id}
    codes = [request.attributes["rpc.response.status_code"] for request in requests]
    assert sorted(codes) == ["NOT_FOUND", "OK", "OK", "OK"]
    for request in requests:
        below = collector.children(request)
        names = [child.name for child in below if child.name != "run"]
        is_refused = request.attributes["rpc.response.status_code"] == "NOT_FOUND"
        assert names == (["decode"] if is_refused else ["decode", "queue", "encode"])
        # Requests that ran together share a run, which is below one of them.
        runs = {child.reference for child in below if child.name == "run"} | set(request.links)
        assert len(runs) == (not is_refused)
