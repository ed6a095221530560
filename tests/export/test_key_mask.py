"""Modules that take `attention_mask` (B, T), 1 = attend: exported with key lengths in its place."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export import export_module
from tests.support.eager import assert_parity
from tests.support.modules import bert

Artifact = tuple[Path, Manifest]
AXES = {0: "batch", 1: "sequence"}
MASK_TYPES = [torch.int64, torch.bool, torch.float32]


class MeanOfRows(nn.Module):
    """The mean of the rows that the mask shows, or of those that it hides."""

    def __init__(self, *, inverse: bool = False) -> None:
        super().__init__()
        self.inverse = inverse

    def forward(self, rows: Tensor, attention_mask: Tensor) -> Tensor:
        shown = attention_mask.float()[..., None]
        shown = 1 - shown if self.inverse else shown
        return (rows * shown).sum(dim=1) / (shown.sum(dim=1) + 1e-6)


def export(module: nn.Module, out: Path, dtype: torch.dtype = torch.int64, **axes: Any) -> Artifact:
    examples = {"rows": torch.zeros(2, 3, 4), "attention_mask": torch.ones(2, 3, dtype=dtype)}
    dynamic_axes = {"rows": AXES, "attention_mask": AXES} | axes
    return export_module(module, examples, dynamic_axes, out=out, name="masked")


@pytest.mark.parametrize("dtype", MASK_TYPES, ids=str)
def test_the_mask_becomes_key_lengths(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, manifest = export(MeanOfRows(), tmp_path, dtype)
    names = {kind: [spec.name for spec in graph.inputs] for kind, graph in manifest.graphs.items()}
    assert names == {GraphKind.PLAIN: ["rows"], GraphKind.LENGTHS: ["rows", "key_lengths"]}
    rows = np.random.default_rng(0).standard_normal((3, 9, 4), np.float32)
    session = onnxruntime.InferenceSession(str(folder / manifest.graphs[GraphKind.LENGTHS].file))
    (found,) = session.run(None, {"rows": rows, "key_lengths": np.array([9, 1, 4])})
    assert_parity(found, np.stack([rows[0].mean(0), rows[1, 0], rows[2, :4].mean(0)]))


def test_a_mask_of_the_inverse_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="depends on rows that attention_mask hides"):
        export(MeanOfRows(inverse=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_mask_over_another_axis_than_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no other input has the axis 'keys'; they have sequence"):
        export(MeanOfRows(), tmp_path, attention_mask={0: "batch", 1: "keys"})


@pytest.fixture(scope="module")
def bert_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    ids, mask = torch.full((2, 3), 49), torch.ones(2, 3, dtype=torch.int64)
    return export_module(
        bert(),
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": AXES, "attention_mask": AXES},
        out=tmp_path_factory.mktemp("bert"),
        name="bert",
        output_names=("context_vectors", "pooled"),
    )


def test_a_bert_model_takes_lengths_up_to_those_of_its_positions(bert_artifact: Artifact) -> None:
    _, manifest = bert_artifact
    assert set(manifest.graphs) == {GraphKind.PLAIN, GraphKind.LENGTHS}
    assert manifest.max_lengths == {"sequence": 64}
    pooled = manifest.graphs[GraphKind.PLAIN].outputs[1]
    assert (pooled.name, pooled.axes) == ("pooled", ("batch", 32))


def test_padded_sequences_of_a_bert_model_equal_those_alone(bert_artifact: Artifact) -> None:
    folder, manifest = bert_artifact
    session = onnxruntime.InferenceSession(str(folder / manifest.graphs[GraphKind.LENGTHS].file))
    ids, lengths = np.random.default_rng(1).integers(0, 50, (3, 64)), np.array([5, 64, 1])
    context, pooled = session.run(None, {"input_ids": ids, "key_lengths": lengths})
    for index, length in enumerate(lengths):
        with torch.inference_mode():
            alone = bert()(torch.from_numpy(ids[index : index + 1, :length]))
        assert_parity(context[index, :length], alone.last_hidden_state[0].numpy())
        assert_parity(pooled[index], alone.pooler_output[0].numpy())
