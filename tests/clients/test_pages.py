"""Pages about clients: docs/client.md is generated, and docs/other-languages.md shows the bytes sent."""

import re
import subprocess
import sys

from grpc_server import Service, running

from scripts import generate_client_reference
from scripts.local_server import ROOT

PAGE = (ROOT / "docs/other-languages.md").read_text()
DOCUMENTED_TARGET = "127.0.0.1:8001"


def block(language: str) -> str:
    """The first fenced block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has no {language} block"
    return found[1]


def test_the_client_sends_the_documented_bytes() -> None:
    service = Service()  # type: ignore[abstract]
    with running(service) as target:
        code = block("python").replace(DOCUMENTED_TARGET, target)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
    dump = "".join(line.partition("#")[0] for line in block("text").splitlines())
    assert [request.SerializeToString() for request in service.requests] == [bytes.fromhex(dump)]


def test_the_reference_of_the_client_is_current() -> None:
    expected = generate_client_reference.reference()
    assert generate_client_reference.PAGE.read_text() == expected, (
        "python -m scripts.generate_client_reference"
    )
