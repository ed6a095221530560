"""Texts cut into passages: each has the embedding of its own text, and says where it stands."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from attention_client import AttentionClient
from attention_client.enrich import EnrichError
from attention_client.enrich.batches import Batch
from numpy.testing import assert_allclose

from attention_serving.enrich import enrich
from tests.encoders.repository import SENTENCE, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, Options, rows_of, token_ids
from tests.support import encoders

pytestmark = pytest.mark.thorough
LONG = "Life is short, eat dessert first; 人生短暂 先吃甜点 \U0001f370. " * 9
TITLES = ["first", None, "third", "fourth"]
BODIES = ["short", None, LONG, ""]
TEXT_ROWS = ["first: short", None, f"third: {LONG}", "fourth: "]
TOKENS, OVERLAP = 40, 12


@pytest.fixture(params=["in process", "on a server"])
def where(request: pytest.FixtureRequest, encoder_repository: Path) -> Options:
    """The options that choose a backend; on servers, with the tokenizer of the models."""
    if request.param == "in process":
        return {"model_repository": encoder_repository}
    server = request.getfixturevalue("encoder_server")
    return {"servers": [server.target], "tokenizer": encoder_repository / SENTENCE / "1"}


def table() -> pa.Table:
    return pa.table({"id": ["a", "b", "c", "d"], "title": TITLES, "body": BODIES})


def run(given: pa.Table | None = None, **options: Any) -> Any:
    wanted = {"model": SENTENCE, "template": "{title}: {body}", "passage_tokens": TOKENS, **options}
    return enrich(table() if given is None else given, **wanted)


def check_passages(text: str, passages: Sequence[str], places: Sequence[tuple[int, int]]) -> None:
    """They cover the text, each fits, and each repeats at most the overlap of the one before."""
    assert [text[start:end] for start, end in places] == list(passages)
    assert (places[0][0], places[-1][1]) == (0, len(text))
    assert all(len(token_ids("bert", passage)) <= TOKENS for passage in passages)
    for (_, end), (start, _) in pairwise(places):
        assert 0 <= len(text[start:end].encode()) <= OVERLAP
        assert start <= end


@pytest.mark.parametrize("prompt", [None, "query"])
def test_one_row_for_each_passage(
    encoder_client: AttentionClient, where: Options, prompt: str | None
) -> None:
    summary = run(passage_overlap=OVERLAP, prompt=prompt, **where)
    result = summary.table
    assert result.column_names == [
        "id", "source_row", "passage", "passage_start", "passage_end", "embedding",
    ]  # fmt: skip
    rows = result.to_pylist()
    assert [row["id"] for row in rows] == ["abcd"[row["source_row"]] for row in rows]
    assert [row["source_row"] for row in rows] == sorted(row["source_row"] for row in rows)
    for number, text in enumerate(TEXT_ROWS):
        own = [row for row in rows if row["source_row"] == number]
        if text is None:
            assert own == [{**dict.fromkeys(result.column_names), "id": "b", "source_row": 1}]
            continue
        places = [(row["passage_start"], row["passage_end"]) for row in own]
        check_passages(text, [row["passage"] for row in own], places)
        assert (len(own) > 10) == (number == 2)
    present = result.filter(result["passage"].is_valid())
    expected = encoder_client.embed(SENTENCE, present["passage"].to_pylist(), prompt=prompt)
    assert_allclose(rows_of(present["embedding"]), expected, rtol=RTOL, atol=ATOL)
    assert (summary.rows, summary.nulls, summary.passages) == (4, 1, len(present))
    written = f"{'query: ' if prompt else ''}{{}}"
    counts = [len(token_ids("bert", written.format(text))) for text in present["passage"].to_pylist()]
    assert max(counts) <= TOKENS
    assert sum(counts) == summary.tokens


def test_lists_of_passages_in_each_row(encoder_client: AttentionClient, where: Options) -> None:
    one_row_each = run(passage_overlap=OVERLAP, **where).table.to_pylist()
    summary = run(passage_overlap=OVERLAP, passages="lists", **where)
    result = summary.table
    assert result.select(["id", "title", "body"]).equals(table())
    assert result.schema.field("embedding").type == pa.list_(pa.list_(pa.float32(), encoders.WIDTH))
    assert result["embedding"].is_null().to_pylist() == [False, True, False, False]
    for number, row in enumerate(result.to_pylist()):
        own = [each for each in one_row_each if each["source_row"] == number and each["passage"] is not None]
        for name in ("passage", "passage_start", "passage_end"):
            assert row[name] == ([each[name] for each in own] or None)
        if own:
            expected = encoder_client.embed(SENTENCE, row["passage"])
            assert_allclose(row["embedding"], expected, rtol=RTOL, atol=ATOL)
    assert summary.passages == sum(len(cell or ()) for cell in result["passage"].to_pylist())


@pytest.mark.parametrize("layout", ["rows", "lists"])
def test_a_row_that_is_refused_has_no_passages(where: Options, layout: str) -> None:
    given = pa.table({"id": range(3), "text": ["a", "b" * ((4 << 20) + 1), LONG]})
    options = {"template": None, "text_column": "text", "passages": layout, **where}
    with pytest.raises(EnrichError, match=r"row 1 is refused: it has 4,194,305 characters"):
        run(given, **options)
    summary = run(given, on_error="skip", **options)
    assert [(refusal.row, refusal.reason) for refusal in summary.refusals] == [(1, "INVALID_CELL")]
    result = summary.table.to_pylist()
    (refused,) = [row for row in result if row["id"] == 1]
    assert (refused["passage"], refused["embedding"]) == (None, None)
    assert all(row["passage"] is not None for row in result if row["id"] != 1)
    assert (summary.nulls, summary.rows) == (0, 3)


def test_rows_of_passages_are_written_in_portions(
    encoder_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that passages repeat does not need memory for all of them at a time."""
    given = pa.table({"text": [LONG, "a"], "blob": pa.array([b"x" * (3 << 20), None], pa.binary())})
    options = {"template": None, "text_column": "text", "model_repository": encoder_repository}
    sizes: list[int] = []
    output = Batch.output

    def noted(batch: Batch) -> Iterator[pa.RecordBatch]:
        for rows in output(batch):
            sizes.append(rows.nbytes)
            yield rows

    monkeypatch.setattr(Batch, "output", noted)
    result = run(given, **options).table
    assert result["blob"].is_valid().to_pylist() == [True] * (len(result) - 1) + [False]
    assert len(result) > 12
    assert max(sizes) < 16 << 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"passage_tokens": 161}, "passage_tokens is 161; model 'sentence' takes at most 160 tokens"),
        ({"passage_tokens": 9, "prompt": "query"}, "special tokens and the prompt take 9: none are left"),
        ({"passage_overlap": 20}, "passage_overlap is 20; it must be at most 19, half of the 38 tokens"),
        ({"model": TRUNCATING, "passage_tokens": 13}, "takes at most 12 tokens"),
    ],
    ids=str,
)
def test_passages_that_cannot_be_cut_are_refused(where: Options, options: Options, words: str) -> None:
    with pytest.raises(EnrichError, match=words):
        run(**{**options, **where})


def test_servers_need_the_tokenizer_of_the_model(where: Options, encoder_repository: Path) -> None:
    if "servers" not in where:
        assert run(**where).passages > 10
        return
    with pytest.raises(EnrichError, match="passages on servers need the model's tokenizer: name its file"):
        run(servers=where["servers"])
    other = encoder_repository / "qwen3" / "1"  # begins a text with another token
    with pytest.raises(EnrichError, match=r"is not the tokenizer of model 'sentence': it makes \d+ tokens"):
        run(servers=where["servers"], tokenizer=other)
