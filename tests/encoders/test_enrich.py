"""Columns of texts become columns of embeddings, equal to those of `embed`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from attention_client import AttentionClient
from attention_client.enrich import EnrichError, Summary
from numpy.testing import assert_allclose

from attention_serving.enrich import enrich
from scripts.local_server import ServerProcess
from tests.encoders.repository import INT8, SENTENCE, SHORT, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, Options, rows_of, token_ids
from tests.support import encoders

pytestmark = pytest.mark.thorough
LONG = "dessert " * 40


@pytest.fixture(params=["in process", "on a server"])
def where(request: pytest.FixtureRequest, encoder_repository: Path) -> Options:
    """The options that choose a backend."""
    if request.param == "in process":
        return {"model_repository": encoder_repository}
    server: ServerProcess = request.getfixturevalue("encoder_server")
    return {"servers": [server.target]}


def texts_of(rows: int) -> list[str | None]:
    """Texts of mixed lengths, and nulls."""
    return [None if row % 11 == 5 else TEXTS[row % len(TEXTS)] + " x" * (row % 7) for row in range(rows)]


def table_of(texts: Sequence[str | None]) -> pa.Table:
    return pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})


def run(table: pa.Table, **options: Any) -> tuple[pa.Table, Summary]:
    summary = enrich(table, **{"text_column": "text", **options})
    assert summary.table is not None
    return summary.table, summary


@pytest.mark.parametrize("name", [SENTENCE, "qwen3", INT8])
def test_every_row_has_the_embedding_of_its_text(
    encoder_client: AttentionClient, where: Options, name: str
) -> None:
    table = table_of(texts_of(300))
    result, summary = run(table, model=name, **where)
    assert result.select(["id", "text"]).equals(table)
    assert result.column_names == ["id", "text", "embedding"]
    given = [text for text in texts_of(300) if text is not None]
    expected = encoder_client.embed(name, given)
    assert result.schema.field("embedding").type == pa.list_(pa.float32(), expected.shape[1])
    assert_allclose(rows_of(result["embedding"].drop_null()), expected, rtol=RTOL, atol=ATOL)
    assert result["embedding"].is_null().equals(table["text"].is_null())
    assert (summary.nulls, summary.refused, summary.truncated, summary.passages) == (27, 0, 0, 0)
    family = name if name in encoders.CASES else "bert"
    assert summary.tokens == sum(len(token_ids(family, text)) for text in given)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "query"},
        {"prompt": ""},
        {"dimensions": 8},
        {"prompt": "query", "dimensions": 16, "truncate": True},
    ],
    ids=str,
)
def test_the_options_are_those_of_embed(
    encoder_client: AttentionClient, where: Options, options: Options
) -> None:
    texts = [*TEXTS, LONG] if options.get("truncate") else list(TEXTS)
    result, summary = run(table_of(texts), model=SENTENCE, **options, **where)
    expected = encoder_client.embed(SENTENCE, texts, **options)
    assert result.schema.field("embedding").type.list_size == expected.shape[1]
    assert_allclose(rows_of(result["embedding"]), expected, rtol=RTOL, atol=ATOL)
    assert summary.truncated == (1 if options.get("truncate") else 0)


def test_the_settings_of_the_model_hold_without_options(
    encoder_client: AttentionClient, where: Options
) -> None:
    result, summary = run(table_of(TEXTS), model=TRUNCATING, **where)
    expected = encoder_client.embed(TRUNCATING, list(TEXTS), truncate=True)
    assert_allclose(rows_of(result["embedding"]), expected, rtol=RTOL, atol=ATOL)
    prompted = [len(token_ids("bert", f"query: {text}")) for text in TEXTS]
    assert summary.truncated == sum(count > SHORT for count in prompted)
    assert summary.tokens == sum(min(count, SHORT) for count in prompted)


def test_a_long_text_is_refused_and_others_are_not(encoder_client: AttentionClient, where: Options) -> None:
    table = table_of(["a", LONG, None, "b"])
    with pytest.raises(
        EnrichError, match=r"row 1 is refused: .* tokens; the limit is 160; --truncate .*; --on-error skip"
    ):
        run(table, model=SENTENCE, **where)
    result, summary = run(table, model=SENTENCE, on_error="skip", **where)
    assert [(refusal.row, refusal.reason) for refusal in summary.refusals] == [(1, "LIMIT_EXCEEDED")]
    assert (summary.refused, summary.nulls) == (1, 1)
    assert [cell.is_valid for cell in result["embedding"]] == [True, False, False, True]
    assert_allclose(result["embedding"][3].as_py(), encoder_client.embed(SENTENCE, "b"), rtol=RTOL, atol=ATOL)
    with pytest.raises(EnrichError, match="nothing was computed: 1 row was refused; the first is row 0: "):
        run(table.slice(1, 2), model=SENTENCE, on_error="skip", **where)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "answer"}, "prompt is 'answer'; model 'sentence' has query, document"),
        ({"model": "bert", "prompt": "query"}, "prompt is 'query'; model 'bert' has no prompts"),
        ({"dimensions": 9}, "dimensions is 9; model 'sentence' allows 8, 16, 32"),
        ({"weights": True}, "is a text encoder, whose attention weights are not stored"),
        ({"text_column": "id"}, "column 'id' is int64; the model takes strings"),
        ({"text_column": None, "template": "{text} {title}"}, "no column 'title' for the text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(
    encoder_repository: Path, options: Options, words: str
) -> None:
    with pytest.raises(EnrichError, match=words):
        run(table_of(["a"]), **{"model": SENTENCE, "model_repository": encoder_repository, **options})
