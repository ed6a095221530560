"""Text encoders as artifacts: graphs, manifest, parity report, and the command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attention_serving.artifact.golden import check_golden, load_golden
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export.__main__ import app
from attention_serving.export.encoder import encoder_spec
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

pytestmark = pytest.mark.thorough


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


def test_dimensions_are_below_the_width_and_a_folder_is_described(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dimensions=32: must lie in 1\.\.31"):
        encoder_spec(load_encoder(folder), dimensions=(encoders.WIDTH,))
    done = CliRunner().invoke(app, ["--encoder", str(folder), "--describe"])
    assert done.exit_code == 0, done.output
    assert "bert text encoder, 3 layers of width 32, mean pooling, normalised" in done.stdout
