"""Retrieval with late chunking: the passages that it prints are those whose tokens say so."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from examples import rag_late_chunking as rag
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import expected_of
from tests.examples.running import run

QUESTION = "How long is the Elbe?"
NAME = "rag_late_chunking"
TOLERANCE = 2e-5


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / np.float32(np.linalg.norm(vector))


def expected_passages() -> dict[str, NDArray[np.float32]]:
    """The sentences of the texts, and the vectors of their tokens in eager PyTorch, pooled.

    The tokenizer makes a token of each byte, after the token that begins a text.
    """
    found = {}
    for name, text in rag.TEXTS.items():
        tokens = expected_of("bert", text).tokens.numpy()
        for sentence in text.replace(". ", ".|").split("|"):
            start = 1 + text.index(sentence)
            found[f"{name}: {sentence}"] = unit(tokens[start : start + len(sentence)].mean(axis=0))
    return found


def printed_scores(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    return {passage: float(score) for score, passage in lines}


def test_passages_have_the_vectors_of_their_tokens_in_the_whole_text(example_server: ServerProcess) -> None:
    with AttentionClient(example_server.target) as client:
        passages, vectors = rag.embed_passages(client, SENTENCE, rag.TEXTS, 20)
    expected = expected_passages()
    assert [f"{passage.source}: {passage.text}" for passage in passages] == list(expected)
    wanted = np.stack(list(expected.values()))
    assert_allclose(vectors, wanted, rtol=0, atol=TOLERANCE)
    distances = np.abs(wanted[:, None] - wanted).max(axis=-1) + np.eye(len(wanted))
    assert distances.min() > 10 * TOLERANCE  # vectors of other tokens would not pass


def test_the_nearest_passages_are_printed_first(
    example_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--server", example_server.target, "--model", SENTENCE]
    question = expected_of("bert", QUESTION, normalised=True).embedding.numpy()
    expected = {passage: float(vector @ question) for passage, vector in expected_passages().items()}
    assert run(NAME, QUESTION, *where, "--top=20") == 0
    found = printed_scores(capsys)
    assert found == pytest.approx(expected, abs=1e-3)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert run(NAME, QUESTION, *where) == 0
    assert list(printed_scores(capsys)) == list(found)[:3]


def test_texts_of_files(
    example_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--server", example_server.target, "--model", SENTENCE]
    path, empty, long = (tmp_path / name for name in ("text", "empty", "long"))
    path.write_text("One sentence that is long enough. Another sentence of this text.\n")
    empty.write_text(" \n")
    long.write_text("dessert " * 200)
    assert run(NAME, QUESTION, path, empty, *where) == 0
    assert set(printed_scores(capsys)) == {
        f"{path}: One sentence that is long enough.",
        f"{path}: Another sentence of this text.",
    }
    for file, message in (
        (empty, "the texts are empty"),
        (long, "the limit is"),
        (tmp_path / "absent", "absent"),
    ):
        assert run(NAME, QUESTION, file, *where) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("length", [1, 10, 1000])
@pytest.mark.parametrize(
    "text", ["", " \n", "a", " A b. C!  D? ", "No end", "1,094 km. e.g. this", "a.\n\nb.\n"]
)
def test_passages_leave_out_nothing_but_spaces(text: str, length: int) -> None:
    spans = rag.split(text, length)
    parts = [text[start:end] for start, end in spans]
    assert all(part and part == part.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(end - start >= length for start, end in spans[:-1])
