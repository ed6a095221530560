"""The commands of attention-client with text encoders."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attention_client import AttentionClient
from attention_client._commands.app import app
from numpy.testing import assert_allclose
from typer.testing import CliRunner, Result

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS

pytestmark = pytest.mark.thorough
runner = CliRunner()


@pytest.fixture
def server(sentence_server: ServerProcess) -> list[str]:
    return ["--server", sentence_server.target]


def run(*arguments: object) -> Result:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def test_embed_writes_a_file(server: list[str], sentence_client: AttentionClient, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "embeddings.npy"
    texts.write_text("dessert\nfirst\n")
    arguments = ["embed", *server, "--model", SENTENCE, "--file", texts]
    assert [line.split()[0] for line in run(*arguments).stdout.splitlines()] == ["dessert", "first"]
    assert f"{out}: (2, 32) float32" in run(*arguments, "--out", out).stdout
    assert_allclose(np.load(out), sentence_client.embed(SENTENCE, ["dessert", "first"]), rtol=RTOL, atol=ATOL)


def test_weights_of_one_layer(server: list[str], sentence_client: AttentionClient) -> None:
    arguments = ["weights", *server, "--model", SENTENCE, "--text", TEXTS[0], "--json"]
    weights = sentence_client.attend_text(SENTENCE, TEXTS[0], return_weights=True).attention_weights
    assert weights is not None
    for layer, options in ((1, ["--layer", 1]), (-1, [])):
        found = json.loads(run(*arguments, *options).stdout)
        assert_allclose(list(found["heads"].values()), weights[layer], rtol=RTOL, atol=ATOL)
    refused = runner.invoke(app, [*arguments, "--layer", "3"])
    assert refused.exit_code == 1
    assert "--layer: expected 0 to 2; found 3" in refused.output


def test_enrich_embeds_passages_of_joined_columns(
    server: list[str],
    sentence_repository: Path,
    sentence_client: AttentionClient,
    tmp_path: Path,
) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"title": ["A", None], "body": ["b " * 40, None]}), source)
    tokenizer = sentence_repository / SENTENCE / "1/tokenizer.json"
    texts = ["--model", SENTENCE, "--template", "{title}\\n{body}", "--prompt", "query", "--dimensions", 8]
    cut = ["--passage-tokens", 40, "--passage-overlap", 4, "--passages", "lists", "--tokenizer", tokenizer]
    done = run("enrich", source, output, *server, *texts, *cut, "--truncate", "--json", "--quiet")
    found = pq.read_table(output).to_pylist()
    assert found[0]["passage"][0].startswith("A\nb b")
    assert json.loads(done.stdout)["passages"] == len(found[0]["passage"]) > 2
    expected = sentence_client.embed(SENTENCE, found[0]["passage"], prompt="query", dimensions=8)
    assert_allclose(found[0]["embedding"], expected, rtol=RTOL, atol=ATOL)
    assert found[1]["embedding"] is None
