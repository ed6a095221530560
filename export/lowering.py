"""Lowers a module to a half precision."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from attention_serving.export.precision import Precision
from attention_serving.export.signature import output_tensors

HALF_TYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def lowered(module: nn.Module, precision: Precision) -> nn.Module:
    """The module to export: the given one, or a copy of it that computes in half precision."""
    dtype = HALF_TYPES.get(precision)
    return module if dtype is None else _HalfPrecision(module, dtype)


class _HalfPrecision(nn.Module):
    """Casts float32 inputs to half precision, and outputs back to float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(dtype)
        self.dtype = dtype

    def forward(self, **options: Any) -> tuple[Tensor, ...]:
        """Calls the module."""
        outputs = self.module(**{name: self._cast(value) for name, value in options.items()})
        return tuple(output.float() for output in output_tensors(outputs))

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value
