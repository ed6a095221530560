"""Columns of texts become columns of embeddings, of whole texts or of passages, equal to those of `embed`."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from attention_client import AttentionClient
from attention_client.enrich import EnrichError, Summary
from numpy.testing import assert_allclose

from attention_serving.enrich import enrich
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, Options, rows_of, token_ids
from tests.support import encoders

pytestmark = pytest.mark.thorough
LONG = "dessert " * 40
TITLES, BODIES = ["first", None, "third"], ["short", None, "人生短暂 先吃甜点 \U0001f370. " * 9]
CUT: Options = {
    "text_column": None,
    "template": "{title}: {body}",
    "passage_tokens": 40,
    "passage_overlap": 12,
}
PASSAGE = ("passage", "passage_start", "passage_end")


@pytest.fixture(params=["in process", "on a server"])
def where(request: pytest.FixtureRequest, encoder_repository: Path) -> Options:
    """The options that choose a backend."""
    if request.param == "in process":
        return {"model_repository": encoder_repository}
    return {"servers": [request.getfixturevalue("encoder_server").target]}


@pytest.fixture
def cutting(where: Options, encoder_repository: Path) -> Options:
    """The same, with what cuts passages: servers need the tokenizer of the model."""
    return where | CUT | ({"tokenizer": encoder_repository / SENTENCE / "1"} if "servers" in where else {})


def table_of(texts: Any) -> pa.Table:
    return pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})


def run(table: pa.Table, **options: Any) -> tuple[pa.Table, Summary]:
    summary = enrich(table, **{"model": SENTENCE, "text_column": "text", **options})
    assert summary.table is not None
    return summary.table, summary


@pytest.mark.parametrize("name", [SENTENCE, "qwen3"])
def test_every_row_has_the_embedding_of_its_text(
    encoder_client: AttentionClient, where: Options, name: str
) -> None:
    texts = [None if row % 11 == 5 else TEXTS[row % 8] + " x" * (row % 7) for row in range(300)]
    result, summary = run(table_of(texts), model=name, **where)
    assert result.select(["id", "text"]).equals(table_of(texts))
    given = [text for text in texts if text is not None]
    expected = encoder_client.embed(name, given)
    assert result.schema.field("embedding").type == pa.list_(pa.float32(), expected.shape[1])
    assert_allclose(rows_of(result["embedding"].drop_null()), expected, rtol=RTOL, atol=ATOL)
    assert result["embedding"].is_null().equals(result["text"].is_null())
    assert (summary.nulls, summary.refused, summary.truncated, summary.passages) == (27, 0, 0, 0)
    family = "bert" if name == SENTENCE else name
    assert summary.tokens == sum(len(token_ids(family, text)) for text in given)


@pytest.mark.parametrize(
    "options", [{"prompt": ""}, {"prompt": "query", "dimensions": 16, "truncate": True}], ids=str
)
def test_the_options_are_those_of_embed(
    encoder_client: AttentionClient, where: Options, options: Options
) -> None:
    texts = [*TEXTS, LONG] if options.get("truncate") else list(TEXTS)
    result, summary = run(table_of(texts), **options, **where)
    expected = encoder_client.embed(SENTENCE, texts, **options)
    assert result.schema.field("embedding").type.list_size == expected.shape[1]
    assert_allclose(rows_of(result["embedding"]), expected, rtol=RTOL, atol=ATOL)
    assert summary.truncated == len(texts) - len(TEXTS)


@pytest.mark.parametrize("prompt", [None, "query"])
def test_passages_are_rows_or_lists_in_each_row(
    encoder_client: AttentionClient, cutting: Options, prompt: str | None
) -> None:
    table = pa.table({"id": ["a", "b", "c"], "title": TITLES, "body": BODIES})
    texts = [f"{TITLES[0]}: {BODIES[0]}", None, f"{TITLES[2]}: {BODIES[2]}"]
    result, summary = run(table, prompt=prompt, **cutting)
    assert result.column_names == ["id", "source_row", *PASSAGE, "embedding"]
    rows = result.to_pylist()
    assert [row["id"] for row in rows] == ["abc"[row["source_row"]] for row in rows]
    assert (summary.rows, summary.nulls, summary.passages) == (3, 1, len(rows) - 1)
    present = [row for row in rows if row["passage"] is not None]
    for row in present:
        text = texts[row["source_row"]] or ""
        assert text[row["passage_start"] : row["passage_end"]] == row["passage"]
    passages = [row["passage"] for row in present]
    counts = [len(token_ids("bert", f"{'query: ' if prompt else ''}{passage}")) for passage in passages]
    assert (max(counts) <= 40, sum(counts)) == (True, summary.tokens)
    expected = encoder_client.embed(SENTENCE, passages, prompt=prompt)
    assert_allclose([row["embedding"] for row in present], expected, rtol=RTOL, atol=ATOL)

    lists, _ = run(table, prompt=prompt, passages="lists", **cutting)
    assert lists.schema.field("embedding").type == pa.list_(pa.list_(pa.float32(), encoders.WIDTH))
    for number, row in enumerate(lists.to_pylist()):
        own = [each for each in present if each["source_row"] == number]
        for name in PASSAGE:
            assert row[name] == ([each[name] for each in own] or None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "answer"}, "prompt is 'answer'; model 'sentence' has query, document"),
        ({"model": "bert", "prompt": "query"}, "prompt is 'query'; model 'bert' has no prompts"),
        ({"dimensions": 9}, "dimensions is 9; model 'sentence' allows 8, 16, 32"),
        ({"weights": True}, "is a text encoder, whose attention weights are not stored"),
        ({"text_column": "id"}, "column 'id' is int64; the model takes strings"),
        ({"passage_tokens": 161}, "passage_tokens is 161; model 'sentence' takes at most 160 tokens"),
        ({"passage_tokens": 9, "prompt": "query"}, "special tokens and the prompt take 9: none are left"),
        ({"passage_tokens": 40, "passage_overlap": 20}, "passage_overlap is 20; it must be at most 19"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(
    encoder_repository: Path, options: Options, words: str
) -> None:
    with pytest.raises(EnrichError, match=words):
        run(table_of(["a"]), **{"model_repository": encoder_repository, **options})


def test_passages_on_servers_need_the_tokenizer_of_the_model(
    encoder_server: ServerProcess, encoder_repository: Path
) -> None:
    options: Options = {"servers": [encoder_server.target], "passage_tokens": 40}
    with pytest.raises(EnrichError, match="passages on servers need the model's tokenizer: name its file"):
        run(table_of(["a"]), **options)
    other = encoder_repository / "qwen3" / "1"  # begins a text with another token
    with pytest.raises(EnrichError, match=r"is not the tokenizer of model 'sentence': it makes \d+ tokens"):
        run(table_of(["a"]), **options, tokenizer=other)


def test_rows_of_passages_keep_columns_of_any_type_and_name(encoder_repository: Path) -> None:
    columns = {
        "text": pa.array(["first", "short", LONG]).view(pa.string()),
        "view": pa.array(["a", "b", "c"], pa.string_view()),
        "runs": pa.RunEndEncodedArray.from_arrays([3], ["a"]),
    }
    table = pa.table([*columns.values(), pa.array([1, 2, 3])], [*columns, "view"])
    options: Options = {"passage_tokens": 40, "model_repository": encoder_repository}
    result, _ = run(table, **options)
    assert result.column_names == ["view", "runs", "view", "source_row", *PASSAGE, "embedding"]
    rows = result["source_row"].to_pylist()
    assert [result[index].to_pylist() for index in range(3)] == [
        ["abc"[row] for row in rows],
        ["a" for _ in rows],
        [row + 1 for row in rows],
    ]
    with pytest.raises(EnrichError, match="there are 2 columns 'view': rename all but one"):
        run(table, text_column="view", **options)


def test_the_advice_for_a_text_that_is_too_long_is_given_once(encoder_repository: Path) -> None:
    options: Options = {"model_repository": encoder_repository}
    with pytest.raises(
        EnrichError, match=r"row 1 is refused: .* gives such rows null; --truncate .* cuts texts"
    ):
        run(table_of(["first", LONG * 9]), **options)
    _, summary = run(table_of(["first", LONG * 9]), on_error="skip", **options)
    assert re.fullmatch(
        r"text: the text has \d+ or more tokens; the limit is 160", summary.refusals[0].message
    )
