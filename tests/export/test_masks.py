"""Masks that are left out of graphs: which they are, that others stay, and that the results are the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.artifact.kernels import AttentionOperator, Kernel
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.graph import finish_graph, trace
from attention_serving.export.parity import GOLDEN_GRID, GraphRunner, grid_cases
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.rewrite import attention_operators
from attention_serving.export.signature import Signature, tensor
from attention_serving.model.text_folders import load_encoder
from tests.server.samples import CROSS
from tests.support import encoders

PLAIN, LENGTHS = GraphKind.PLAIN, GraphKind.LENGTHS
NOTHING, MASK, OF_LENGTHS, CAUSAL = "nothing", "mask", "lengths", "causal"
# By family, how its layers say who attends to whom, in the graphs `plain` and `lengths`.
FAMILIES = {
    "bert": ([NOTHING], [OF_LENGTHS]),
    "roberta": ([NOTHING], [OF_LENGTHS]),
    "xlm-roberta": ([NOTHING], [OF_LENGTHS]),
    "distilbert": ([NOTHING], [OF_LENGTHS]),
    # Every third layer is global.
    "modernbert": ([MASK, NOTHING], [MASK, OF_LENGTHS]),
    "qwen3": ([CAUSAL], [CAUSAL]),
    # All layers but the first have a window.
    "qwen2": ([CAUSAL, MASK], [CAUSAL, MASK]),
    "llama": ([CAUSAL], [CAUSAL]),
    "mistral": ([MASK], [MASK]),
    "clip_text_model": ([CAUSAL], [CAUSAL]),
    # Its relative positions are added to the scores, which is no Attention operator.
    "mpnet": ([], []),
}


def rule(operator: AttentionOperator) -> str:
    """How an operator says who attends to whom."""
    rules = {MASK: operator.has_mask, OF_LENGTHS: operator.has_lengths, CAUSAL: operator.causal}
    return " and ".join(name for name, applies in rules.items() if applies) or NOTHING


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_of_every_family_have_masks_only_for_windows(name: str, tmp_path: Path) -> None:
    spec = encoder_spec(load_encoder(encoders.save_model(name, tmp_path / name)))
    for kind, rules in zip((PLAIN, LENGTHS), FAMILIES[name], strict=True):
        (signature,) = (each for each in spec.signatures if each.kind is kind)
        operators = attention_operators(trace(spec.module, signature).model)
        assert sorted(map(rule, operators)) == sorted(rules)
        assert sum(operator.count for operator in operators) == (encoders.LAYERS if rules else 0)
        for operator in operators:
            half = operator.model_copy(update={"data_type": "float16"})
            kernel = half.kernel({"query_length": 13})
            assert kernel is (Kernel.UNFUSED if operator.has_mask else Kernel.FLASH)


def test_the_manifest_states_the_operators_of_every_graph(artifacts: Path) -> None:
    manifest = Manifest.load(artifacts / CROSS / "1")
    rules = {kind: [rule(each) for each in graph.attention] for kind, graph in manifest.graphs.items()}
    # Others have their operators in loops, or compute attention by products.
    assert {kind: each for kind, each in rules.items() if each} == {
        GraphKind.PLAIN: [NOTHING],
        GraphKind.LENGTHS: [OF_LENGTHS],
        GraphKind.MASK: [MASK],
        GraphKind.CONTEXT: [NOTHING],
    }
    assert manifest.opset == 24


class Masked(nn.Module):
    """Self-attention whose mask says, in one of many ways, which rows a row attends to."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.says = says

    def mask(self, size: int, lengths: Tensor, batch: int) -> Tensor:
        """(B, 1, T, T) or what broadcasts to it."""
        rows = torch.arange(size)
        within = rows < lengths[:, None]
        pairs = {
            "all": torch.ones(batch, 1, size, size, dtype=torch.bool),
            "all, as numbers": torch.zeros(batch, 1, size, size),
            "none": torch.zeros(batch, 1, size, size, dtype=torch.bool),
            "lengths": within[:, None, None, :],
            "lengths, written from behind": (lengths[:, None] > rows)[:, None, None, :],
            "lengths and all": (within.long().bool()[:, None, None] & torch.ones(size, 1, dtype=torch.bool)),
            "lengths of the next sequence": within.flip(0)[:, None, None, :],
            "one more than the lengths": (rows <= lengths[:, None])[:, None, None, :],
            "lengths of queries": within[:, None, :, None],
            "causal": rows[:, None] >= rows,
            "causal and lengths": (rows[:, None] >= rows) & within[:, None, None, :],
            "later rows": rows[:, None] <= rows,
            "earlier rows alone": rows[:, None] > rows,
            "window": (rows[:, None] - rows).abs() < 3,
        }
        return pairs[self.says]

    def forward(self, query: Tensor, key_lengths: Tensor) -> Tensor:
        """(B, T, 8) to (B, T, 8)."""
        mask = self.mask(query.shape[1], key_lengths, query.shape[0])
        mask = mask.expand(query.shape[0], 1, query.shape[1], query.shape[1])
        heads = query[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0]


@pytest.mark.parametrize(
    ("says", "expected"),
    {
        "all": NOTHING,
        "all, as numbers": NOTHING,
        "none": MASK,
        "lengths": OF_LENGTHS,
        "lengths, written from behind": OF_LENGTHS,
        "lengths and all": OF_LENGTHS,
        "lengths of the next sequence": MASK,
        "one more than the lengths": MASK,
        "lengths of queries": MASK,
        "causal": CAUSAL,
        "causal and lengths": MASK,
        "later rows": MASK,
        "earlier rows alone": MASK,
        "window": MASK,
    }.items(),
)
def test_a_mask_is_left_out_only_if_it_says_what_the_operator_can(
    says: str, expected: str, tmp_path: Path
) -> None:
    module, rows = Masked(says).eval(), ("batch", "query_length", 8)
    signature = Signature(
        kind=LENGTHS,
        inputs=(tensor("query", "float32", *rows), tensor("key_lengths", "int64", "batch")),
        outputs=(tensor("context_vectors", "float32", *rows),),
        least_key_length=0,
    )
    model = trace(module, signature).model
    assert [rule(operator) for operator in attention_operators(model)] == [expected]
    file = tmp_path / "model.onnx"
    file.write_bytes(finish_graph(model, signature).SerializeToString())
    runner = GraphRunner(module, signature, file, TOLERANCES[Precision.FP32])
    for _, case in grid_cases(module, signature, GOLDEN_GRID):
        if says != "none":
            assert np.isfinite(case.outputs["context_vectors"]).all()
        assert runner.compare([case])
