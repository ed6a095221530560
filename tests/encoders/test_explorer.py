"""The page that draws attention weights, in a real browser."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionResult
from attention_client._commands.weights import page_answer, save
from attention_client._models import PatternInfo

from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import INT8, SENTENCE
from tests.server.samples import CROSS
from tests.server.security.samples import entry, write_tokens
from tests.support import node_package
from tests.support.processes import serving_models

pytestmark = pytest.mark.thorough
PACKAGE = ROOT / "clients/explorer"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TOKEN = "explorer-token"  # noqa: S105 - of this test's server only


@pytest.fixture(scope="module")
def explored(
    encoder_repository: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of some encoders and of a cross-attention, with the page and a token."""
    folder = tmp_path_factory.mktemp("explorer")
    models = [encoder_repository / name for name in ("bert", "modernbert", "qwen3", SENTENCE, INT8)]
    tokens = write_tokens(folder / "tokens.json", entry("explorer", TOKEN, "infer:*", "read"))
    options = ("--http-port=0", "--http-explore", f"--tokens={tokens}")
    with serving_models(folder, [*models, artifacts / CROSS], *options) as process:
        yield process


def browser() -> str:
    """A Chromium; a test that needs it is skipped where there is none, or no node, or its packages."""
    found = os.environ.get("EXPLORER_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found or shutil.which("npm") is None or not (PACKAGE / "node_modules").is_dir():
        pytest.skip("needs Chromium (or EXPLORER_BROWSER), and `npm ci` in clients/explorer")
    return found


def test_the_page_in_a_browser(explored: ServerProcess, tmp_path: Path) -> None:
    """Runs clients/explorer/test/browser.test.ts."""
    chromium = browser()
    # A mask forbids three pairs; a pair that is allowed has the weight 0.
    few = np.array([[[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]], np.float32)
    write_answer(tmp_path / "masked.html", few, np.array([[True, True, False], [True, False, False]]))
    scores = np.random.default_rng(0).random((12, 12, 128, 128), np.float32)
    write_answer(tmp_path / "large.html", scores / scores.sum(-1, keepdims=True))
    variables = {
        **os.environ,
        "EXPLORER_BROWSER": chromium,
        "EXPLORER_URL": f"http://127.0.0.1:{explored.http_port}/explore",
        "EXPLORER_TOKEN": TOKEN,
        "EXPLORER_FOLDER": str(tmp_path),
    }
    done = node_package.run(PACKAGE, "npm", "test", env=variables)
    node_package.succeed(done)
    assert "skipped 0" in done.stdout


def write_answer(path: Path, weights: Any, mask: Any = None) -> None:
    """Writes the page of an answer with these weights: (L, H, Tq, Tk)."""
    layers, _, queries, keys = weights.shape
    result: Any = AttentionResult(weights[0, 0], weights, path.stem, "7")
    inputs = {"query": np.empty((queries, keys)), **({} if mask is None else {"mask": mask})}
    answer = page_answer(result, inputs, [PatternInfo(causal=False, window=0)] * layers)
    save([answer], path)
