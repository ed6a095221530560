"""The page that draws attention weights: files of `weights --html`, and the page in a real browser."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient
from attention_client._commands.app import app
from attention_client._commands.weights_page import page_answer, save
from attention_client._models import PatternInfo
from typer.testing import CliRunner

from scripts.local_server import ROOT, ServerProcess, serving
from tests.encoders.repository import INT8, SENTENCE
from tests.server.http.clients import http_port
from tests.server.samples import CROSS
from tests.server.security.samples import entry, write_tokens
from tests.support import node_package
from tests.support.artifacts import link_tree
from tests.support.encoders import LAYERS

pytestmark = pytest.mark.thorough
PACKAGE = ROOT / "clients/explorer"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TOKEN = "explorer-token"  # noqa: S105 - of this test's server only
TEXT = "dessert first"


@pytest.fixture(scope="module")
def explored(
    encoder_repository: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of some encoders and of a cross-attention, with the page and a token."""
    folder = tmp_path_factory.mktemp("explorer")
    models = [encoder_repository / name for name in ("bert", "modernbert", "qwen3", SENTENCE, INT8)]
    for model in [*models, artifacts / CROSS]:
        link_tree(model, folder / "models" / model.name)
    tokens = write_tokens(folder / "tokens.json", entry("explorer", TOKEN, "infer:*", "read"))
    options = ("--http-port=0", "--http-explore", f"--tokens={tokens}")
    with serving(folder / "models", folder / "log", *options) as process:
        yield process


@pytest.fixture(scope="module")
def client(explored: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(explored.target, token=TOKEN) as client:
        yield client


def write(server: ServerProcess, path: Path, *arguments: object) -> Any:
    """Runs the command and returns the answers in the page that it writes."""
    command = ["--server", server.target, "--token", TOKEN, "weights", "--html", path, *arguments]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{path}: {path.stat().st_size} bytes, ")
    page = path.read_text(encoding="utf-8")
    data = page.partition('<script type="application/json" id="answers">')[2].partition("</script>")[0]
    return json.loads(data)


def weights_of(answer: Any) -> Any:
    shape = (answer["layers"], answer["heads"], len(answer["queries"]), len(answer["keys"]))
    return np.frombuffer(base64.b64decode(answer["weights"]), "<f4").reshape(shape)


def test_a_file_of_two_precisions(explored: ServerProcess, client: AttentionClient, tmp_path: Path) -> None:
    answers = write(explored, tmp_path / "a.html", "--model", SENTENCE, "--text", TEXT, "--compare", INT8)
    assert [answer["model"] for answer in answers] == [SENTENCE, INT8]
    for answer in answers:
        expected = client.attend_text(answer["model"], TEXT, return_weights=True).attention_weights
        np.testing.assert_array_equal(weights_of(answer), expected)
        assert answer["subject"] == TEXT
        assert answer["keys"] == ["·", *TEXT, "·"]  # the tokens of this tokenizer are characters
        assert answer["patterns"] == [{"causal": False, "window": 0}] * LAYERS


def test_a_file_of_arrays_with_a_mask(
    explored: ServerProcess, client: AttentionClient, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "query": rng.standard_normal((2, 4), np.float32),
        "key": rng.standard_normal((3, 6), np.float32),
        "value": rng.standard_normal((3, 5), np.float32),
        "mask": np.array([[True, True, False], [True, False, True]]),
    }
    options: list[object] = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += [f"--{name}", tmp_path / f"{name}.npy"]
    (answer,) = write(explored, tmp_path / "a.html", "--model", CROSS, *options)
    expected = client.attend(CROSS, **arrays, return_weights=True).attention_weights
    np.testing.assert_array_equal(weights_of(answer)[0], expected)
    assert answer["mask"]["shape"] == [2, 3]
    assert (answer["queries"], answer["keys"]) == (["0", "1"], ["0", "1", "2"])
    assert answer["patterns"] == [{"causal": False, "window": 0}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of --text, --ids and --query"),
        (["--text", "a", "--compare", "n"], "--compare needs --html"),
        (["--text", "a", "--key", "[[1]]"], "--key and --value need --query"),
        (["--query", "[[[1]], [[2]]]"], "has 3 axes; one sequence has 2"),
        (["--text", "a", "--html", "a.html", "--layer", "0"], "a page has all layers and heads"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["--server", "127.0.0.1:1", "weights", "--model", "m", *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())


def browser() -> str:
    """A Chromium; a test that needs it is skipped where there is none, or no node, or its packages."""
    found = os.environ.get("EXPLORER_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip("no Chromium: install one, or name it with EXPLORER_BROWSER")
    if shutil.which("npm") is None or not (PACKAGE / "node_modules").is_dir():
        pytest.skip("the packages of clients/explorer are not installed: run `npm ci` there")
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
        "EXPLORER_URL": f"http://127.0.0.1:{http_port(explored.log)}/explore",
        "EXPLORER_TOKEN": TOKEN,
        "EXPLORER_FOLDER": str(tmp_path),
    }
    done = node_package.run(PACKAGE, "npm", "test", env=variables)
    node_package.succeed(done)
    assert "skipped 0" in done.stdout


def write_answer(path: Path, weights: Any, mask: Any = None) -> None:
    """Writes the page of an answer with these weights: (L, H, Tq, Tk)."""
    layers, _, queries, keys = weights.shape
    answer = page_answer(
        model=path.stem,
        version="7",
        subject=f"query ({queries}, {keys})",
        queries=[str(index) for index in range(queries)],
        keys=[str(index) for index in range(keys)],
        weights=weights,
        patterns=[PatternInfo(causal=False, window=0)] * layers,
        mask=mask,
    )
    save([answer], path)
