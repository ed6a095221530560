"""Retrieval with late chunking: it prints the nearest passages of texts, cut at sentences."""

from pathlib import Path

import pytest

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.examples.conftest import Run

QUESTION = "How long is the Elbe?"


def printed_scores(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    return {passage: float(score) for score, passage in lines}


@pytest.mark.thorough
def test_the_nearest_passages_are_printed_first(
    example_server: ServerProcess, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: object) -> int:
        where = ("--server", example_server.target, "--model", SENTENCE)
        return run("rag_late_chunking", QUESTION, *arguments, *where)

    assert ask("--top=20") == 0
    found = printed_scores(capsys)
    assert len(found) > 3
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert ask() == 0
    assert list(printed_scores(capsys)) == list(found)[:3]
    path = tmp_path / "text"
    path.write_text("One sentence that is long enough. Another sentence of this text.\n")
    assert ask(path) == 0
    sentences = ("One sentence that is long enough.", "Another sentence of this text.")
    assert set(printed_scores(capsys)) == {f"{path}: {sentence}" for sentence in sentences}
    assert ask(tmp_path / "absent") == 1
