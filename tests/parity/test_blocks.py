"""Every attention system in blocks of query rows: the graphs that servers run for long sequences."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind, Manifest
from attention_serving.export.signature import Signature, random_inputs, run_eager, signatures
from attention_serving.server.engine.model import MOST_BLOCK_ROWS
from tests.support.artifacts import cached_repositories
from tests.support.eager import assert_parity
from tests.support.systems import MODELS, SYSTEMS, build

# Two blocks, one of which has fewer rows.
QUERY_LENGTH, KEY_LENGTH = MOST_BLOCK_ROWS + 45, MOST_BLOCK_ROWS + 17


@pytest.fixture(scope="module")
def repository() -> Path:
    (folder,) = cached_repositories(MODELS)
    return folder


def signature(name: str, kind: GraphKind) -> Signature:
    return next(each for each in signatures(build(name)) if each.kind is kind)


def session(repository: Path, name: str, kind: GraphKind) -> onnxruntime.InferenceSession:
    folder = repository / name / "1"
    path = folder / Manifest.load(folder).graphs[kind].file
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", [GraphKind.BLOCKS, GraphKind.MASK_BLOCKS])
@pytest.mark.parametrize("name", SYSTEMS.values(), ids=SYSTEMS)
def test_equals_eager(repository: Path, name: str, kind: GraphKind) -> None:
    """For masks that hold for all heads and for each, with rows that may attend to nothing."""
    module, signed = build(name), signature(name, kind)
    heads = module.config.num_heads
    bare = session(repository, name, kind)
    for mask_heads in (1, heads) if kind is GraphKind.MASK_BLOCKS else (1,):
        sizes = {"batch": 1, "query_length": QUERY_LENGTH, "key_length": KEY_LENGTH}
        sizes |= {"mask_heads": mask_heads, "block_rows": MOST_BLOCK_ROWS}
        inputs = random_inputs(signed, sizes, np.random.default_rng(5))
        if "attention_mask" in inputs:
            inputs["attention_mask"][:, :, [2, MOST_BLOCK_ROWS + 1]] = False
        (found,) = bare.run(["context_vectors"], inputs)
        assert_parity(found, run_eager(module, signed, inputs)["context_vectors"])


def test_every_system_has_both_graphs(repository: Path) -> None:
    for name in SYSTEMS.values():
        assert set(Manifest.load(repository / name / "1").graphs) == set(ATTENTION_GRAPHS)
