"""Which CUDA kernel is predicted for an Attention operator, against what ONNX Runtime's sources say."""

from typing import Any

import pytest

from attention_serving.artifact.kernels import AttentionOperator, Kernel

BERT: dict[str, Any] = {
    "count": 1,
    "data_type": "float16",
    "num_heads": 12,
    "num_key_heads": 12,
    "key_width": 64,
    "value_width": 64,
    "query_axis": "query_length",
    "key_axis": "query_length",
    "has_mask": False,
    "has_lengths": False,
    "causal": False,
}
CROSS = {"key_axis": "key_length"}
FLASH, EFFICIENT, UNFUSED = Kernel.FLASH, Kernel.MEMORY_EFFICIENT, Kernel.UNFUSED


@pytest.mark.parametrize(
    ("changes", "rows", "kernel"),
    [
        ({}, 7, FLASH),
        ({"data_type": "bfloat16", "has_lengths": True}, 7, FLASH),
        ({"causal": True, "num_key_heads": 4}, 7, FLASH),
        ({"key_width": 256, "value_width": 256}, 7, FLASH),
        (CROSS, 7, FLASH),
        ({**CROSS, "causal": True}, 7, EFFICIENT),
        ({"query_axis": None, "key_axis": None, "causal": True}, 7, EFFICIENT),
        ({"data_type": "float32"}, 7, EFFICIENT),
        ({"data_type": "float32", "has_lengths": True}, 7, EFFICIENT),
        ({"data_type": "float32", "num_key_heads": 4}, 7, UNFUSED),
        ({"value_width": 32}, 7, EFFICIENT),
        ({"key_width": 264, "value_width": 264}, 7, EFFICIENT),
        ({"key_width": 1032, "value_width": 1032}, 8, UNFUSED),
        ({"key_width": 20, "value_width": 20}, 8, UNFUSED),
        ({"has_mask": True}, 8, EFFICIENT),
        ({"has_mask": True}, 6, UNFUSED),
        ({"has_mask": True, "key_axis": 12}, 6, EFFICIENT),
        ({"has_mask": True, "key_axis": None}, 8, UNFUSED),
        ({"has_mask": True, "has_lengths": True, "data_type": "float32"}, 8, EFFICIENT),
    ],
)
def test_the_kernel_follows_from_the_operator_and_the_number_of_keys(
    changes: dict[str, Any], rows: int, kernel: Kernel
) -> None:
    operator = AttentionOperator.model_validate({**BERT, **changes})
    assert operator.kernel({"query_length": rows, "key_length": rows}) is kernel
