"""Identity over HTTP: 401 and 403, before a large body is read; and metrics that are protected."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attention_serving.server.http.child import HttpOptions
from attention_serving.server.http.exchange import Metadata, Service
from attention_serving.server.security.peers import forward
from attention_serving.server.settings import Settings
from scripts.local_server import ServerProcess, serving
from tests.server.http.clients import HOST, answer_on, ask, connected, head, http_port, read
from tests.server.http.scripted import Scripted
from tests.server.samples import CROSS, SELF
from tests.server.security.samples import entry, eventually, write_tokens

BODY = {"inputs": [{"name": "query", "shape": [1, 2, 4], "datatype": "FP32", "data": [0.5] * 8}]}
INFER = f"/v2/models/{SELF}/infer"
ENTRIES = (
    entry("all", "all-token", "infer:*", "read", "admin"),
    entry("caller", "caller-token", f"infer:{SELF}"),
    entry("reader", "reader-token", "read"),
)


class Secured(NamedTuple):
    """A server with tokens, and its HTTP port."""

    process: ServerProcess
    port: int
    file: Path


@pytest.fixture(scope="module")
def secured(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("identity")
    file = write_tokens(folder / "tokens.json", *ENTRIES)
    options = (f"--tokens={file}", "--http-port=0", "--protect-metrics", "--model-control=explicit")
    with serving(artifacts, folder / "log", *options, "--load-model=*") as process:
        yield Secured(process, http_port(process.log), file)


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("path", "body", "token", "status"),
    [
        (INFER, BODY, "all-token", 200),
        (INFER, BODY, "caller-token", 200),
        (INFER, BODY, None, 401),
        (INFER, BODY, "wrong", 401),
        (INFER, BODY, "reader-token", 403),
        (f"/v2/models/{CROSS}/infer", BODY, "caller-token", 403),
        ("/v2", None, "reader-token", 200),
        ("/v2", None, None, 401),
        ("/v2", None, "caller-token", 403),
        (f"/v2/models/{SELF}", None, None, 401),
        (f"/v2/models/{SELF}/ready", None, "reader-token", 200),
        ("/v2/repository/index", {}, "caller-token", 403),
        (f"/v2/repository/models/{SELF}/load", {}, "reader-token", 403),
        ("/v2/logging", {}, "caller-token", 403),
        ("/v2/logging", {}, "all-token", 200),
        ("/v2/health/live", None, None, 200),
        ("/v2/health/ready", None, None, 200),
    ],
)
def test_requests_have_the_rights_of_their_callers(
    secured: Secured, path: str, body: Any, token: str | None, status: int
) -> None:
    answer = ask(secured.port, path, body, bearer(token))
    assert answer.status == status, answer.body
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
    if status >= 400:
        assert answer.error


def test_a_request_without_a_body_is_refused_at_once(secured: Secured) -> None:
    with connected(secured.port) as connection:
        for _ in range(2):  # on the same connection: there was nothing to read and to drop
            connection.sendall(head("/v2", method="GET"))
            answer = answer_on(connection)
            assert answer.status == 401
            assert "connection" not in answer.headers


LARGE, EXPECT = f"Content-Length: {1 << 20}", "Expect: 100-continue"
ALL, READER, CALLER = (f"Authorization: Bearer {name}-token" for name in ("all", "reader", "caller"))


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (INFER, [LARGE], 401),
        (INFER, [LARGE, "Authorization: Bearer wrong"], 401),
        (INFER, [LARGE, ALL, ALL], 401),
        (INFER, [LARGE, "Authorization: Basic YTpi"], 401),
        (INFER, [LARGE, READER], 403),
        (f"/v2/models/{CROSS}/infer", [LARGE, CALLER], 403),
        (f"/v2/repository/models/{SELF}/load", [LARGE, CALLER], 403),
        (INFER, ["Transfer-Encoding: chunked"], 401),
        (INFER, ["Content-Encoding: gzip", "Content-Length: 100"], 401),
    ],
)
def test_a_large_body_is_refused_before_it_is_read(
    secured: Secured, path: str, headers: list[str], status: int
) -> None:
    """Only the head is sent: it announces a body that may be large and never comes."""
    with connected(secured.port) as connection:
        connection.sendall(head(path, EXPECT, *headers))
        assert answer_on(connection).status == status


def test_a_large_body_of_a_known_caller_is_answered(secured: Secured) -> None:
    rows = 20_000
    body = {"inputs": [{**BODY["inputs"][0], "shape": [rows // 100, 100, 4], "data": [0.5] * 4 * rows}]}
    assert ask(secured.port, INFER, body, bearer("caller-token")).status == 200


async def test_an_approval_holds_for_the_same_caller_method_and_model(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on all that decides about rights, and on nothing that differs from request to request."""
    monkeypatch.setattr("attention_serving.server.http.exchange.APPROVED_SECONDS", 60)
    settings = Settings.model_validate({"model_repository": "."})
    backend = Service(HttpOptions(settings=settings, target=f"{HOST}:{scripted.port}"))
    token, other = ("authorization", "Bearer a"), ("authorization", "Bearer b")
    names, others = forward(["a"]), forward(["b"])

    async def questions(metadata: Metadata, rpc: str = "ModelInfer", model: str = "m") -> int:
        await backend.authorize(rpc, model, metadata)
        count = scripted.calls.qsize()
        while not scripted.calls.empty():
            assert scripted.next().method == "Check"
        return count

    try:
        first = [("x-request-id", "1"), token]
        assert await questions(first) == 1
        again = [("x-request-id", "2"), ("traceparent", "t"), ("tracestate", "s"), token]
        assert await questions(again) == 0
        assert await questions(first, rpc="RepositoryModelLoad") == 1
        assert await questions(first, model="n") == 1
        callers: list[Metadata] = [[other], [token, other], [], [names], [others], [names, token]]
        for metadata in callers:
            assert await questions(metadata) == 1
            assert await questions(metadata) == 0
    finally:
        await backend.close()


def test_a_token_that_is_revoked_is_refused(secured: Secured) -> None:
    name = entry("temporary", "temporary-token", "infer:*")
    write_tokens(secured.file, *ENTRIES, name)
    assert eventually(lambda: ask(secured.port, INFER, BODY, bearer("temporary-token")).status == 200)
    connection = http.client.HTTPConnection(HOST, secured.port, timeout=60)
    try:
        write_tokens(secured.file, *ENTRIES)

        def status() -> int:  # on one connection, which stays
            connection.request("POST", INFER, json.dumps(BODY), bearer("temporary-token"))
            return read(connection.getresponse()).status

        assert eventually(lambda: status() == 401)
    finally:
        connection.close()


def metrics(process: ServerProcess, token: str | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, process.metrics_port, timeout=60)
    try:
        connection.request("GET", "/metrics", headers=bearer(token))
        answer = read(connection.getresponse())
    finally:
        connection.close()
    assert (answer.headers.get("www-authenticate") == "Bearer") == (answer.status == 401)
    return answer.status, answer.body.decode()


def test_metrics_are_protected_by_setting(secured: Secured) -> None:
    assert ask(secured.port, INFER, BODY).status == 401
    assert metrics(secured.process, None)[0] == 401
    assert metrics(secured.process, "wrong")[0] == 401
    assert metrics(secured.process, "caller-token") == (
        403,
        "the identity 'caller' does not have the right read\n",
    )
    status, text = metrics(secured.process, "reader-token")
    assert status == 200
    assert 'attention_refused_requests_total{reason="CREDENTIALS_MISSING"}' in text


def test_a_file_that_becomes_bad_keeps_its_tokens_and_is_counted(secured: Secured) -> None:
    secured.file.write_text("{")
    counted = 'attention_security_reloads_total{result="failure",what="tokens"}'
    assert eventually(lambda: counted in metrics(secured.process, "reader-token")[1])
    assert ask(secured.port, INFER, BODY, bearer("caller-token")).status == 200
    write_tokens(secured.file, *ENTRIES)


def test_nothing_secret_is_logged(secured: Secured) -> None:
    ask(secured.port, INFER, BODY, bearer("t0p-s3cret"))
    ask(secured.port, INFER, BODY, bearer("caller-token"))
    text = secured.process.log.read_text()
    assert not [word for word in ("t0p-s3cret", "caller-token", "Bearer") if word in text]
