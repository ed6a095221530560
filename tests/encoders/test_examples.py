"""The examples of vector stores find the passages that NumPy finds; the blocks of docs/encoders.md run."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose

from attention_serving.enrich import enrich
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import Options, rows_of
from tests.server.samples import ROOT
from tests.support import encoders
from tests.support.processes import run_python

pytestmark = pytest.mark.thorough
EXAMPLES = ROOT / "examples/vector_stores"
QUERY, COUNT = "eat dessert first", 3
ODD = "a\ttab, a \\ and a\nnew line"


@pytest.fixture(scope="module")
def passages(sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of passages, one of which has characters with a meaning, and a row without."""
    folder = tmp_path_factory.mktemp("vector-stores")
    texts = ["Life is short, eat dessert first. " * 6, None, ODD, "人生短暂 先吃甜点 " * 7]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    options: Options = {"model": SENTENCE, "text_column": "text", "passage_tokens": 48}
    enrich(folder / "in.parquet", folder / "out.parquet", model_repository=sentence_repository, **options)
    return folder / "out.parquet"


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def embedded(passages: Path) -> pa.Table:
    table = pq.read_table(passages)
    return table.filter(table["embedding"].is_valid())


@pytest.mark.parametrize("store", ["duckdb", "faiss"])
def test_a_store_finds_the_nearest_passages(passages: Path, client: AttentionClient, store: str) -> None:
    module = example(f"{store}_search")
    query, table = client.embed(SENTENCE, QUERY), embedded(passages)
    similarities = rows_of(table["embedding"]) @ query  # vectors of length 1
    by_text = dict(zip(table["passage"].to_pylist(), similarities.tolist(), strict=True))
    found = module.search(str(passages), query, COUNT)
    assert_allclose(
        [similarity for _, similarity in found], sorted(by_text.values())[: -COUNT - 1 : -1], atol=1e-5
    )
    assert_allclose([by_text[text] for text, _ in found], [value for _, value in found], atol=1e-5)


def test_the_script_for_pgvector_has_every_passage(passages: Path) -> None:
    """In the text format of COPY: a line for each row, tabs between columns, vectors in brackets."""
    text = "".join(example("pgvector_load").script(str(passages)))
    head, _, rest = text.partition("COPY passages FROM STDIN;\n")
    assert f"embedding vector({encoders.WIDTH})" in head
    lines, _, tail = rest.partition("\\.\n")
    assert "USING hnsw (embedding vector_cosine_ops)" in tail
    table = embedded(passages)
    rows = [line.split("\t") for line in lines.splitlines()]
    assert [int(row) for row, _, _ in rows] == table["source_row"].to_pylist()
    assert r"a\ttab, a \\ and a\nnew line" in [passage for _, passage, _ in rows]
    vectors = np.array([vector.strip("[]").split(",") for *_, vector in rows], np.float32)
    assert (vectors == rows_of(table["embedding"])).all()


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/encoders.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["client", "late-chunking", "openai"])
def test_block(server: ServerProcess, port: int, block: str) -> None:
    for documented, here in (
        ("127.0.0.1:8001", server.target),
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
        ("text-encoder", SENTENCE),
        ("dimensions=256", "dimensions=16"),
    ):
        block = block.replace(documented, here)
    done = run_python("-c", block)
    assert (done.returncode, done.stderr) == (0, "")
