"""The OpenAPI document, the pages, and docs/http.md: its examples run, and it names every route."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attention_serving.server.http.openapi import document
from attention_serving.server.http.routes import ROUTES
from scripts.local_server import serving
from tests.server.http.clients import ask, http_port
from tests.server.http.scripted import SERVICE
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/http.md").read_text()


def test_every_method_of_the_service_has_a_route() -> None:
    own, streamed = {"Embeddings", "EncoderModels"}, {"ModelStreamInfer"}
    assert {method.name for method in SERVICE.methods} - streamed == {route.name for route in ROUTES} - own


def test_the_description_names_every_route_and_its_references_exist(port: int) -> None:
    answer = ask(port, "/openapi.json")
    assert answer.json == document()
    described = answer.json["paths"]
    expected = {(path, route.verb.lower()) for route in ROUTES for path in route.paths}
    assert {(path, verb) for path, verbs in described.items() for verb in verbs} == expected
    names = [operation["operationId"] for verbs in described.values() for operation in verbs.values()]
    assert len(set(names)) == len(names)
    for kind, name in re.findall(r'"\$ref": "#/components/(\w+)/(\w+)"', answer.body.decode()):
        assert name in answer.json["components"][kind]
    infer = described["/v2/models/{model}/infer"]["post"]
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream"}


def test_the_page_of_the_description_needs_no_other_host(port: int) -> None:
    answer = ask(port, "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert b'http-equiv="Content-Security-Policy" content="default-src \'none\';' in answer.body
    assert b"//" not in answer.body


@pytest.mark.thorough
def test_the_examples_of_the_page_run(artifacts: Path, tmp_path: Path) -> None:
    (shell,) = (block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "curl " in block)
    (python,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with serving(artifacts, tmp_path / "log", "--http-port=0") as server:
        here = f"127.0.0.1:{http_port(server.log)}"
        for command in (
            ["/bin/sh", "-e", "-c", shell.replace("curl ", "curl --fail ").replace("127.0.0.1:8000", here)],
            [sys.executable, "-c", python.replace("127.0.0.1:8000", here)],
        ):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 3, 16) [3 3]\n"
