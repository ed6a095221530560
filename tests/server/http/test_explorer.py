"""The page at /explore without a browser: what is sent, what its policy allows, and who sees which models."""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from attention_client import AttentionClient

from attention_serving.server.http.app import EXPLORER as PAGE
from attention_serving.server.http.app import explorer_headers
from scripts.local_server import ServerProcess, serving
from tests.server import samples
from tests.server.http.clients import Answer, ask, http_port
from tests.server.http.scripted import Front
from tests.server.security.samples import entry, write_tokens

READER, INFERRER = "reader-token", "caller-token"


@pytest.fixture(scope="module")
def explored(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the page, which knows two tokens."""
    folder = tmp_path_factory.mktemp("explorer")
    entries = [
        entry("reader", READER, f"read:{samples.SELF}", "infer:*"),
        entry("caller", INFERRER, "infer:*"),
    ]
    file = write_tokens(folder / "tokens.json", *entries)
    options = ("--http-port=0", "--http-explore", f"--tokens={file}")
    with serving(artifacts, folder / "log", *options) as process:
        yield process


def get(server: ServerProcess, path: str, token: str = "") -> Answer:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return ask(http_port(server.log), path, headers=headers)


def test_the_page_is_sent_without_a_token_and_its_policy_allows_what_it_contains(
    explored: ServerProcess,
) -> None:
    answer = get(explored, "/explore")
    assert (answer.status, answer.body) == (200, PAGE.read_bytes())
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = answer.body.decode()
    allowed = dict(
        directive.split(" ", 1) for directive in answer.headers["content-security-policy"].split("; ")
    )
    assert allowed == {
        "default-src": "'none'",
        "script-src": f"'sha256-{inline(page, 'script')}'",
        "style-src": f"'sha256-{inline(page, 'style')}'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


def inline(page: str, element: str) -> str:
    """The hash of the one element without attributes, as a policy writes it."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def test_the_page_names_no_other_host() -> None:
    page = PAGE.read_text()
    outside = re.sub(r'<pre id="licences">.*?</pre>', "", page, flags=re.DOTALL)
    # Names of XML namespaces are no addresses: nothing is loaded from them.
    assert set(re.findall(r"\w+://[^\"'`\s]*", outside)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/XML/1998/namespace",
        "http://www.w3.org/2000/xmlns/",
    }
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|\b(?:src|href)=|@import|url\(", outside)


def test_a_page_without_a_policy_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not state a content security policy"):
        explorer_headers("<html></html>")


def test_the_models_are_those_that_the_caller_may_read(explored: ServerProcess) -> None:
    answer = get(explored, "/explore/models", READER)
    assert answer.status == 200
    (described,) = answer.json["models"]
    with AttentionClient(explored.target, token=READER) as client:
        (model,) = client.models()
    assert (described["name"], described["version"]) == (samples.SELF, model.version)
    assert described["state"] == "STATE_READY"
    assert described["attention_patterns"] == [{"causal": True, "window": 0}]
    assert [asdict(pattern) for pattern in model.attention_patterns] == described["attention_patterns"]
    assert described["num_heads"] == model.num_heads
    assert [output["name"] for output in described["outputs"]] == ["context_vectors", "attention_weights"]


def test_without_the_right_to_read_models_are_not_listed(explored: ServerProcess) -> None:
    assert get(explored, "/explore/models").status == 401
    assert get(explored, "/explore/models", "unknown").status == 401
    refused = get(explored, "/explore/models", INFERRER)
    assert refused.status == 403
    assert "read" in refused.error


@pytest.mark.parametrize("path", ["/explore", "/explore/models"])
def test_without_the_setting_there_is_no_page(shared_front: Front, path: str) -> None:
    assert ask(shared_front.port, path).status == 404
