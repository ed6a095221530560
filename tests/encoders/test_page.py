"""Runs the Python blocks of docs/encoders.md."""

import re
import subprocess
import sys

import pytest

from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import SENTENCE

pytestmark = pytest.mark.thorough
PAGE = (ROOT / "docs/encoders.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["client", "late-chunking", "openai"])
def test_block(sentence_server: ServerProcess, sentence_http_port: int, block: str) -> None:
    for documented, here in (
        ("127.0.0.1:8001", sentence_server.target),
        ("127.0.0.1:8000", f"127.0.0.1:{sentence_http_port}"),
        ("text-encoder", SENTENCE),
        ("dimensions=256", "dimensions=16"),
    ):
        block = block.replace(documented, here)
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
