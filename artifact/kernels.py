"""Which kernel of ONNX Runtime's CUDA provider computes an Attention operator.

Source: `onnxruntime/core/providers/cuda/llm/attention.cc`, `ComputeInternal`, of ONNX Runtime 1.31. Devices
before compute capability 8.0 have no flash attention.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from attention_serving.artifact.tolerance import Record, Size

# Widths of a head: what the kernels are compiled for.
WIDTH_MULTIPLE, MOST_FLASH_WIDTH, MOST_EFFICIENT_WIDTH = 8, 256, 1024
# Of the row of a mask, in elements.
MASK_ALIGNMENT = 4


class Kernel(IntEnum):
    """A kernel; the fastest first."""

    FLASH = 0
    """Holds no scores, and skips padding that lengths tell of."""
    MEMORY_EFFICIENT = 1
    """Holds no scores. A mask is read as one number for each score."""
    UNFUSED = 2
    """Holds all scores (B, H, Tq, Tk) twice, in float32."""


class AttentionOperator(Record):
    """Attention operators of a graph that are alike."""

    count: Size
    data_type: Literal["float32", "float16", "bfloat16"]
    """Element type of the queries, keys and values."""
    num_heads: Size
    num_key_heads: Size
    key_width: Size
    """Width of a query and of a key of one head."""
    value_width: Size
    query_axis: str | Size | None
    """Axis of the graph's inputs whose size is the number of query rows, or that number; None if unknown."""
    key_axis: str | Size | None
    has_mask: bool
    has_lengths: bool
    """Whether it takes the number of keys of each sequence."""
    causal: bool

    def kernel(self, sizes: Mapping[str, int]) -> Kernel:
        """The kernel of a run.

        Args:
            sizes: Sizes of the symbolic axes. One that matters and is absent counts as unsuitable.
        """
        is_half, is_grouped = self.data_type != "float32", self.num_heads != self.num_key_heads
        widths = (self.key_width, self.value_width)
        if any(width % WIDTH_MULTIPLE or width > MOST_EFFICIENT_WIDTH for width in widths):
            return Kernel.UNFUSED
        is_square = self.query_axis is not None and self.query_axis == self.key_axis
        has_flash_widths = self.key_width == self.value_width <= MOST_FLASH_WIDTH
        if is_half and has_flash_widths and not self.has_mask and (is_square or not self.causal):
            return Kernel.FLASH
        keys = self.key_axis if isinstance(self.key_axis, int) else sizes.get(self.key_axis or "", 1)
        is_unaligned = self.has_mask and keys % MASK_ALIGNMENT
        return Kernel.UNFUSED if is_unaligned or (is_grouped and not is_half) else Kernel.MEMORY_EFFICIENT
