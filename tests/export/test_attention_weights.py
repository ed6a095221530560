"""Which outputs of a module are taken for attention weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attention_serving.artifact.manifest import BATCH_AXIS, GraphKind
from attention_serving.export.probe import find_outputs
from attention_serving.export.signature import Signature, tensor

WIDTH, HEADS = 4, 2


def scores(x: Tensor, keys: int = 0) -> Tensor:
    """(B, H, T, T), or as many columns as are given."""
    columns = x if not keys else x.new_ones(len(x), keys, WIDTH)
    return (x @ columns.mT)[:, None] * x.new_tensor([1.0, -1.0]).reshape(1, HEADS, 1, 1)


class Outputs(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = self.compute(x)
        return (x, *outputs) if isinstance(outputs, tuple) else (x, outputs)


# By name: what a module returns beside its rows, the names of the outputs, and which has the weights.
CASES: dict[str, tuple[Callable[[Tensor], Tensor | tuple[Tensor, ...]], str]] = {
    "of heads": (lambda x: scores(x).softmax(-1), "first"),
    "averaged": (lambda x: scores(x).softmax(-1).mean(1), "first"),
    "in bfloat16": (lambda x: scores(x).softmax(-1).bfloat16(), "first"),
    "of a class token": (lambda x: torch.cat([scores(x), scores(x, 1)], -1).softmax(-1), "first"),
    "of learned queries": (lambda x: scores(x)[:, :, :1].expand(-1, -1, 3, -1).softmax(-1), "first"),
    "of two layers": (lambda x: (scores(x).softmax(-1), (2 * scores(x)).softmax(-1)), "second"),
    "beside scores": (lambda x: (scores(x).softmax(-1), scores(x)), "first"),
    "scores": (scores, ""),
    "sigmoids": (lambda x: scores(x).sigmoid(), ""),
    "columns of sum 1": (lambda x: scores(x).softmax(-2), ""),
    "classes of rows": (lambda x: x.softmax(-1), ""),
    "negative": (lambda x: 2 * scores(x).softmax(-1) - 1 / x.shape[1], ""),
}


@pytest.mark.parametrize(("compute", "expected"), CASES.values(), ids=CASES)
def test_weights_are_rows_over_keys_that_sum_to_1(
    compute: Callable[[Tensor], Tensor | tuple[Tensor, ...]], expected: str
) -> None:
    inputs = (tensor("x", "float32", BATCH_AXIS, "rows", WIDTH),)
    signature = Signature(kind=GraphKind.PLAIN, inputs=inputs, outputs=(), key_axis="rows")
    names = ["x", "first", "second"][: 3 if isinstance(compute(torch.ones(1, 2, WIDTH)), tuple) else 2]
    assert find_outputs(Outputs(compute), signature, names).attention_weights == expected
