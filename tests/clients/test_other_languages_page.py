"""The bytes that docs/other-languages.md shows are those that the Python client sends."""

import re
import subprocess
import sys

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from scripts.local_server import ROOT
from tests.support.recording import REFUSAL, recording

PAGE = (ROOT / "docs/other-languages.md").read_text()
DOCUMENTED_TARGET = "127.0.0.1:8001"


def block(language: str) -> str:
    """The first fenced block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has no {language} block"
    return found[1]


def documented_bytes() -> bytes:
    """The bytes of the dump, without its comments."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in block("text").splitlines()))


def test_the_client_sends_the_documented_bytes() -> None:
    with recording() as (target, requests):
        code = block("python").replace(DOCUMENTED_TARGET, target)
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert REFUSAL in ended.stderr
    assert requests == [documented_bytes()]


def test_the_dump_states_the_lengths_and_the_mask_that_it_explains() -> None:
    request = pb.AttendRequest.FromString(documented_bytes())
    assert list(request.query.lengths) == [2, 1]
    assert len(request.query.data) == 4 * request.query.width * sum(request.query.lengths)
    assert [request.mask.bits[i // 8] >> i % 8 & 1 for i in range(5)] == [1, 0, 1, 1, 1]
