"""Text encoders as artifacts: graphs, manifest, parity report, and the command."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from attention_serving.artifact.golden import check_golden, load_golden
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.__main__ import app
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.precision import Precision
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

pytestmark = pytest.mark.thorough
MODEL = ModelId("encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.save_sentence_model("bert", tmp_path_factory.mktemp("bert"))


def test_the_command_writes_an_artifact_with_every_graph_and_changes_nothing_the_second_time(
    folder: Path, tmp_path: Path
) -> None:
    arguments = ["--encoder", str(folder), "--name", "bert", "--out", str(tmp_path), "--truncate"]
    arguments += ["--dimensions", "8", "--dimensions", "16"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
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

    files = {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()}
    assert f"{artifact} (unchanged)" in CliRunner().invoke(app, arguments).stdout
    assert {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()} == files


@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet", "qwen3"])
def test_int8_keeps_the_direction_of_embeddings(tmp_path: Path, name: str) -> None:
    loaded = load_encoder(encoders.save_model(name, tmp_path / "source"))
    # Wide: scores of small models with random weights are large, and amplify rounding.
    tolerance = Tolerance(rtol=0.1, atol=0.2)
    spec, precision = encoder_spec(loaded), Precision.INT8
    artifact, manifest = write_artifact(
        spec, MODEL, tmp_path / "out", precision=precision, tolerance=tolerance
    )
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    assert 0.99 < report["min_cosine"] < 1
    assert report["max_abs_error"] > 1e-5


def test_the_graph_alone_equals_the_library(tmp_path: Path) -> None:
    loaded = load_encoder(encoders.save_model("modernbert", tmp_path / "source"))
    artifact, manifest = write_artifact(encoder_spec(loaded), MODEL, tmp_path / "out")
    graph = artifact / manifest.graphs[GraphKind.LENGTHS].file
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    sequences = [encoders.random_ids("modernbert", length) for length in (30, 11)]
    ids = np.array([sequences[0], [*sequences[1], *[0] * 19]])
    (found,) = session.run(None, {"token_ids": ids, "key_lengths": np.array([30, 11])})
    model = encoders.make_model("modernbert")
    for index, sequence in enumerate(sequences):
        expected = encoders.expected("modernbert", model, sequence).embedding
        assert_allclose(found[index], expected.numpy(), rtol=1e-3, atol=1e-4)


def test_dimensions_are_below_the_width(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dimensions=32: must lie in 1\.\.31"):
        encoder_spec(load_encoder(folder), dimensions=(encoders.WIDTH,))


def test_describe_writes_nothing(folder: Path) -> None:
    done = CliRunner().invoke(app, ["--encoder", str(folder), "--describe"])
    assert done.exit_code == 0, done.output
    assert "bert text encoder, 3 layers of width 32, mean pooling, normalised" in done.stdout


def test_the_callers_random_numbers_are_kept(folder: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_encoder(folder)
    assert torch.equal(torch.rand(1), expected)
