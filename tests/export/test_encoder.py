"""Text encoders as artifacts: graphs, manifest, parity report, and the command."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose

from attention_serving.artifact.golden import check_golden, load_golden
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.artifact.tolerance import Tolerance, least_cosine
from attention_serving.export.encoder import EncoderOptions, write_encoder
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelId("encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.save_sentence_model("bert", tmp_path_factory.mktemp("bert"))


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_writes_an_artifact_with_every_graph(folder: Path, tmp_path: Path) -> None:
    done = run(
        "--encoder",
        folder,
        "--name",
        "bert",
        "--out",
        tmp_path,
        "--dimensions",
        8,
        "--dimensions",
        16,
        "--truncate",
    )
    assert done.returncode == 0, done.stderr
    assert "smallest cosine of embeddings 1.0000" in done.stdout
    artifact = tmp_path / "bert/1"
    manifest = Manifest.load(artifact)
    manifest.verify_files(artifact)
    outputs = {kind: [spec.name for spec in graph.outputs] for kind, graph in manifest.graphs.items()}
    tokens = ["embedding", "context_vectors"]
    assert outputs == {
        GraphKind.PLAIN: ["embedding"],
        GraphKind.LENGTHS: ["embedding"],
        GraphKind.BLOCKS: ["embedding"],
        GraphKind.TOKENS: tokens,
        GraphKind.WEIGHTS: [*tokens, "attention_weights"],
    }
    check_golden(artifact / manifest.golden, load_golden(artifact / manifest.golden), manifest)
    assert manifest.encoder is not None
    assert (manifest.encoder.dimensions, manifest.encoder.truncates) == ((8, 16), True)
    assert manifest.max_lengths == {"query_length": encoders.POSITIONS}
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    assert report["min_cosine"] > 0.999999
    assert {case["graph"] for case in report["cases"]} == set(outputs)


def test_a_second_export_changes_nothing(folder: Path, tmp_path: Path) -> None:
    loaded = load_encoder(folder)
    first, manifest = write_encoder(loaded, MODEL, tmp_path)
    files = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    _, second = write_encoder(load_encoder(folder), MODEL, tmp_path)
    assert second == manifest
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == files


@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet", "qwen3"])
@pytest.mark.parametrize("precision", [Precision.INT8])
def test_int8_keeps_the_direction_of_embeddings(tmp_path: Path, name: str, precision: Precision) -> None:
    loaded = load_encoder(encoders.save_model(name, tmp_path / "source"))
    # Wide: scores of small models with random weights are large, and amplify rounding.
    tolerance = Tolerance(rtol=0.1, atol=0.2)
    artifact, manifest = write_encoder(
        loaded, MODEL, tmp_path / "out", precision=precision, tolerance=tolerance
    )
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    assert 0.99 < report["min_cosine"] < 1
    assert report["max_abs_error"] > 1e-5


def test_the_graph_alone_equals_the_library(tmp_path: Path) -> None:
    loaded = load_encoder(encoders.save_model("modernbert", tmp_path / "source"))
    artifact, manifest = write_encoder(loaded, MODEL, tmp_path / "out")
    graph = artifact / manifest.graphs[GraphKind.LENGTHS].file
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    sequences = [encoders.random_ids("modernbert", length) for length in (30, 11)]
    ids = np.array([sequences[0], [*sequences[1], *[0] * 19]])
    (found,) = session.run(None, {"token_ids": ids, "key_lengths": np.array([30, 11])})
    model = encoders.make_model("modernbert")
    for index, sequence in enumerate(sequences):
        expected = encoders.expected("modernbert", model, sequence).embedding
        assert_allclose(found[index], expected.numpy(), rtol=1e-3, atol=1e-4)


def test_dimensions_are_below_the_width(folder: Path, tmp_path: Path) -> None:
    options = EncoderOptions(dimensions=(encoders.WIDTH,))
    with pytest.raises(ValueError, match=r"dimensions=32: must lie in 1\.\.31"):
        write_encoder(load_encoder(folder), MODEL, tmp_path, options=options)


REFUSED = {
    "a preset": (["self-attention", "--encoder", "f"], 2, "--encoder and a preset exclude each other"),
    "weights": (["--encoder", "f", "--weights", "w"], 2, "--encoder and --weights exclude each other"),
    "heads": (["--encoder", "f", "--heads", "2"], 2, "--encoder and --heads exclude each other"),
    "pooling alone": (["self-attention", "--pooling", "cls"], 2, "--pooling needs --encoder"),
    "pooling": (["--encoder", "f", "--pooling", "top"], 2, "--pooling 'top' does not exist"),
    "no name": (["--encoder", "f"], 2, "--name is missing"),
    "no folder": (["--encoder", "no-such", "--name", "n", "--out", "o"], 1, "no-such: is not a folder"),
}


@pytest.mark.parametrize(("arguments", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_usage_is_refused(arguments: list[str], status: int, message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr


def test_describe_writes_nothing(folder: Path) -> None:
    done = run("--encoder", folder, "--describe")
    assert done.returncode == 0, done.stderr
    assert "bert text encoder, 3 layers of width 32, mean pooling, normalised" in done.stdout


def test_least_cosine_is_that_of_the_worst_pair() -> None:
    eager = np.eye(3, dtype=np.float32)
    turned = eager.copy()
    turned[1] = (0, 1, 1)
    assert least_cosine(eager, eager) == 1
    assert least_cosine(turned, eager) == pytest.approx(0.5**0.5)
    turned[2] = np.nan
    assert least_cosine(turned, eager) == 0


def test_the_callers_random_numbers_are_kept(folder: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_encoder(folder)
    assert torch.equal(torch.rand(1), expected)
