"""The line of each request, and what identifies it."""

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
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.observe.records import REQUEST_ID
from attention_serving.server.security.guard import Guard
from scripts.local_server import serving
from tests.server.api.messages import attend_request
from tests.server.api.secured import bearer
from tests.server.http.clients import ask, http_port
from tests.server.samples import SELF, TEXT
from tests.server.seams import PATIENCE_SECONDS, Served

ATTEND = "attention.v1.AttentionService/Attend"
SENTINEL, TOKEN, VALUE = "quixotic zephyr", "token-that-nobody-may-see", 0.123456789


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Restores the level that the log of requests sets."""
    logger = logging.getLogger("attention_serving.server.requests")
    level = logger.level
    yield
    logger.setLevel(level)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "attention_serving.server.requests"]


def trailing(call: Any) -> dict[str, Any]:
    """What came with the status of a call."""
    return dict(call.trailing_metadata())


def values(record: logging.LogRecord) -> dict[str, Any]:
    return vars(record)


def test_a_request_has_a_line_with_its_size_stages_and_code(
    self_model: LoadedModel, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    request = attend_request([2, 5])
    parent = f"00-{7:032x}-{9:016x}-00"
    named = (("x-request-id", "mine"), ("traceparent", parent), *bearer("all-token"))
    with Served(self_model, guard=guard, recorder=Recorder("all")) as served:
        AttentionServiceStub(served.channel).Attend(request, timeout=PATIENCE_SECONDS, metadata=named)
        served.calls.ended(1)
    (line,) = lines(caplog)
    found = values(line)
    assert line.getMessage() == "request"
    assert (found["request_id"], found["method"], found["code"]) == ("mine", ATTEND, "OK")
    assert (found["model"], found["version"]) == (SELF, "1")
    assert (found["sequences"], found["rows"]) == (2, 7)
    assert found["trace_id"] == f"{7:032x}"
    assert found["bytes_in"] == request.ByteSize()
    assert found["bytes_out"] > 7 * 4
    stages = [found[f"{stage}_ms"] for stage in ("decode", "queue", "run", "encode")]
    assert all(stage >= 0 for stage in stages)
    assert sum(stages) <= found["total_ms"] + 0.01
    assert found["caller"] == "token:all"
    assert "reason" not in found
    assert "all-token" not in caplog.text


def test_failed_requests_only(self_model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with Served(self_model, recorder=Recorder("failed")) as served:
        attend = AttentionServiceStub(served.channel).Attend
        attend(attend_request([2]), timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            attend(attend_request([]), timeout=PATIENCE_SECONDS)
        served.calls.ended(2)
    (line,) = lines(caplog)
    found = values(line)
    assert (found["code"], found["reason"], found["model"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", SELF)
    assert "queue_ms" not in found
    assert trailing(caught.value)[REQUEST_ID] == found["request_id"]


def test_each_request_of_a_stream_has_a_line_and_so_has_the_stream(
    self_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    bad = pb.AttendStreamRequest(id="bad", request=pb.AttendRequest(model_name="nobody"))
    good = pb.AttendStreamRequest(id="good", request=attend_request([3]))
    with Served(self_model, recorder=Recorder("all")) as served:
        call = AttentionServiceStub(served.channel).AttendStream(iter([good, bad]), timeout=PATIENCE_SECONDS)
        assert len(list(call)) == 2
        served.calls.ended(1)
    first, second, last = map(values, lines(caplog))
    assert [line["msg"] for line in (first, second, last)] == ["request", "request", "stream"]
    assert (first["code"], first["rows"]) == ("OK", 3)
    assert (second["code"], second["reason"]) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert (last["code"], last["requests"]) == ("OK", 2)
    assert last["bytes_in"] == first["bytes_in"] + second["bytes_in"]
    assert last["bytes_out"] == first["bytes_out"] + second["bytes_out"]
    assert first["request_id"] == second["request_id"] == last["request_id"]


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("a" * 128, True), ("a" * 129, False), ("", False), ("two words", False)],
    ids=["longest", "too long", "empty", "spaces"],
)
def test_an_identifier_is_taken_if_it_is_sane(self_model: LoadedModel, given: str, is_taken: bool) -> None:
    with Served(self_model) as served:
        attend = AttentionServiceStub(served.channel).Attend
        _, call = attend.with_call(
            attend_request([2]), timeout=PATIENCE_SECONDS, metadata=((REQUEST_ID, given),)
        )
        returned = trailing(call)
        with pytest.raises(grpc.RpcError) as caught:
            attend(attend_request([]), timeout=PATIENCE_SECONDS, metadata=((REQUEST_ID, given),))
    failed = trailing(caught.value)[REQUEST_ID]
    # Nobody knows an identifier that was made for a call that succeeded, unless it is logged.
    assert returned.get(REQUEST_ID) == (given if is_taken else None)
    assert failed == given if is_taken else len(failed) == 32


@pytest.mark.thorough
def test_neither_content_nor_secrets_are_logged(artifacts: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--log-requests=all", "--log-level=DEBUG", "--http-port=0")
    with serving(artifacts, log, *options) as server:
        query = np.full((3, 4), VALUE, np.float32)
        metadata: dict[str, str | bytes] = {"secret-bin": TOKEN.encode(), "x-api-key": TOKEN}
        with AttentionClient(server.target, token=TOKEN, metadata=metadata) as client:
            client.attend(SELF, query)
            with suppress(InvalidArgumentError):  # the model need not know the words
                client.attend_text(TEXT, SENTINEL)
            list(client.attend_stream(SELF, [query, query]))
            with pytest.raises(NotFoundError) as caught:
                client.attend(SENTINEL, query)
            with pytest.raises(ValueError, match="query"):
                client.attend(SELF, np.full((3, 5), VALUE, np.float32))
        port, headers = http_port(log), {"authorization": f"Bearer {TOKEN}", "x-request-id": "over-http"}
        text = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [SENTINEL]}]}
        answer = ask(port, f"/v2/models/{TEXT}/infer?{SENTINEL.split(maxsplit=1)[0]}", text, headers)
        assert ask(port, f"/v2/models/{SELF}/infer", {"inputs": SENTINEL}, headers).status == 400
        assert server.stop() == 0
    assert answer.headers["x-request-id"] == "over-http"
    written = log.read_text()
    for secret in (*SENTINEL.split(), TOKEN, str(VALUE), str(float(np.float32(VALUE)))):
        assert secret not in written
    requests = re.findall(r" INFO request request_id=(\S+)", written)
    assert len(requests) >= 7
    assert caught.value.request_id in requests
    assert requests.count("over-http") == 1
    assert len(re.findall(r" INFO http request request_id=over-http", written)) == 2
