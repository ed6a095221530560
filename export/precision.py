"""Element types that a graph may compute in. Inputs and outputs are float32 in all of them."""

import copy
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

from artifact.tolerance import Tolerance
from export.graph import quiet


class Precision(StrEnum):
    """What the arithmetic is done in."""

    FP32 = "fp32"
    """The default and the proof."""
    FP16 = "fp16"
    """IEEE half precision."""
    BF16 = "bf16"
    """bfloat16."""
    INT8 = "int8"
    """Linear layers in 8-bit integers, activations quantised at run time; the rest in float32."""


# torch.testing.assert_close's tolerances for float32.
FP32_TOLERANCE = Tolerance(rtol=1.3e-6, atol=1e-5)
# How far from eager PyTorch in float32 each may be, on standard normal inputs; that of fp16 and bf16 is some
# units of their last place.
TOLERANCES = {
    Precision.FP32: FP32_TOLERANCE,
    Precision.FP16: Tolerance(rtol=5e-3, atol=5e-3),
    Precision.BF16: Tolerance(rtol=4e-2, atol=4e-2),
    Precision.INT8: Tolerance(rtol=5e-2, atol=1e-1),
}
HALF_TYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def lowered(module: nn.Module, precision: Precision) -> nn.Module:
    """The module that is exported: the given one, or a copy of it that computes in half precision."""
    dtype = HALF_TYPES.get(precision)
    return module if dtype is None else _HalfPrecision(module, dtype)


class _HalfPrecision(nn.Module):
    """Casts float32 inputs down and outputs up again."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(dtype)
        self.dtype = dtype

    def forward(self, **options: Any) -> tuple[Tensor, ...]:
        """Calls the module."""
        outputs = self.module(**{name: self._cast(value) for name, value in options.items()})
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return tuple(output.float() for output in outputs if output is not None)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value


def quantised(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with 8-bit linear layers (ONNX Runtime's dynamic quantisation, standard operators)."""
    # It recommends its own shape inference, which graphs that were inferred by the exporter do not need.
    with tempfile.TemporaryDirectory() as folder, quiet(""):
        path = Path(folder) / "graph.onnx"
        types = ["MatMul", "Gemm"]
        quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=types,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )
        return onnx.load(path)
