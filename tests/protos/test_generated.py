"""The generated code is up to date, and can be imported with the client's copy."""

from pathlib import Path

import pytest

from attention_serving.protos.generate import TARGETS, generated
from tests.support.processes import run_python


@pytest.mark.parametrize(("folder", "package", "sources"), TARGETS, ids=["server", "client"])
def test_the_generated_code_is_up_to_date(folder: Path, package: str, sources: tuple[str, ...]) -> None:
    fresh = generated(package, sources)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*_pb2*.py*")}
    assert {name: code for name, code in found.items() if "__pycache__" not in name} == fresh


def test_a_process_can_import_the_client_after_that_of_triton() -> None:
    """tests/server/api/test_contexts.py imports it beside the server's copy of the generated code."""
    done = run_python("-c", "import tritonclient.grpc, attention_client")
    assert (done.returncode, done.stderr) == (0, "")
