"""Text encoders as artifacts: graphs, manifest and parity report; and the command that describes one."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from attention_serving.artifact.golden import golden_cases, token_inputs
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export.__main__ import app
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.options import Reference
from attention_serving.model.text_folders import load_encoder
from tests.encoders.repository import DIMENSIONS, SENTENCE
from tests.support import encoders

# Texts of the reference that servers replay, and golden vectors of the graphs.
TEXTS, CASES = 24, 14


def test_an_artifact_has_every_graph_and_the_facts_of_the_encoder(sentence_repository: Path) -> None:
    artifact = sentence_repository / SENTENCE / "1"
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
    tokenizer = Tokenizer.from_file(str(artifact / "tokenizer.json"))
    golden = golden_cases(artifact, manifest, token_inputs(tokenizer, ["token_ids"], encoders.POSITIONS))
    assert len(golden) == TEXTS + CASES
    assert manifest.made_with["reference"].startswith("sentence-transformers 6.")
    assert manifest.encoder is not None
    assert (manifest.encoder.dimensions, manifest.encoder.truncates) == (DIMENSIONS, False)
    assert manifest.max_lengths == {"query_length": encoders.POSITIONS}
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    assert report["min_cosine"] > 0.999999
    assert report["texts"]["count"] == 64
    assert report["texts"]["min_cosine"] > 0.999999
    assert {case["graph"] for case in report["cases"]} == set(outputs)


def test_dimensions_are_below_the_width_and_a_folder_is_described(tmp_path: Path) -> None:
    folder = encoders.save_sentence_model("bert", tmp_path / "bert")
    encoder = load_encoder(folder)
    with pytest.raises(ValueError, match=r"dimensions=32: must lie in 1\.\.31"):
        encoder_spec(encoder, dimensions=(encoders.WIDTH,))
    moved = load_encoder(folder.rename(tmp_path / "moved"))
    same = [encoder_spec(each, reference=Reference.NONE).identity for each in (encoder, moved)]
    assert same[0] == same[1]  # an export of a folder that was copied is no other artifact
    folder = tmp_path / "moved"
    given = ["--encoder", str(folder), "--dimensions", "8", "--truncate", "--describe"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "bert text encoder, 3 layers of width 32, mean pooling, normalised" in done.stdout
