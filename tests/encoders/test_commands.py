"""The command of attention-client that embeds texts."""

from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient
from attention_client._commands.app import app
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL

pytestmark = pytest.mark.thorough


def test_embed_prints_embeddings_or_writes_a_file(
    sentence_server: ServerProcess, sentence_client: AttentionClient, tmp_path: Path
) -> None:
    texts, out = tmp_path / "texts", tmp_path / "embeddings.npy"
    texts.write_text("dessert\nfirst\n")
    arguments = ["embed", "--server", sentence_server.target, "--model", SENTENCE, "--file", str(texts)]
    printed = CliRunner().invoke(app, arguments)
    assert [line.split()[0] for line in printed.stdout.splitlines()] == ["dessert", "first"]
    assert f"{out}: (2, 32) float32" in CliRunner().invoke(app, [*arguments, "--out", str(out)]).stdout
    assert_allclose(np.load(out), sentence_client.embed(SENTENCE, ["dessert", "first"]), rtol=RTOL, atol=ATOL)
