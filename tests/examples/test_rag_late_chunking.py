"""Retrieval with late chunking: the passages that it prints are those whose tokens say so."""

from itertools import pairwise
from pathlib import Path

import pytest

from examples import rag_late_chunking as rag
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import expected_of
from tests.examples.conftest import Run

QUESTION = "How long is the Elbe?"


def expected_scores() -> dict[str, float]:
    """The cosines of the sentences: their vectors are the tokens in eager PyTorch, pooled.

    The tokenizer makes a token of each byte, after the token that begins a text.
    """
    question = expected_of("bert", QUESTION, normalised=True).embedding.numpy()
    found = {}
    for name, text in rag.TEXTS.items():
        tokens = expected_of("bert", text).tokens.numpy()
        for sentence in text.replace(". ", ".|").split("|"):
            start = 1 + text.index(sentence)
            vector = rag.normalised(tokens[start : start + len(sentence)].mean(axis=0))
            found[f"{name}: {sentence}"] = float(vector @ question)
    return found


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
    assert found == pytest.approx(expected_scores(), abs=1e-3)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert ask() == 0
    assert list(printed_scores(capsys)) == list(found)[:3]

    path, empty, long = (tmp_path / name for name in ("text", "empty", "long"))
    path.write_text("One sentence that is long enough. Another sentence of this text.\n")
    empty.write_text(" \n")
    long.write_text("dessert " * 200)
    assert ask(path, empty) == 0
    sentences = ("One sentence that is long enough.", "Another sentence of this text.")
    assert set(printed_scores(capsys)) == {f"{path}: {sentence}" for sentence in sentences}
    for file, message in (
        (empty, "texts are empty"),
        (long, "the limit is"),
        (tmp_path / "absent", "absent"),
    ):
        assert ask(file) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", " \n", " A b. C!  D? ", "No end", "1,094 km. e.g. this", "a.\n\nb.\n"])
def test_passages_leave_out_nothing_but_spaces(text: str) -> None:
    for length in (1, 10, 1000):
        spans = rag.split(text, length)
        parts = [text[start:end] for start, end in spans]
        assert all(part and part == part.strip() for part in parts)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end - start >= length for start, end in spans[:-1])
