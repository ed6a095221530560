"""Element types of the arithmetic in a graph, and their tolerances. Inputs and outputs are always float32."""

from enum import StrEnum

from attention_serving.artifact.tolerance import Tolerance


class Precision(StrEnum):
    """Element type of the arithmetic."""

    FP32 = "fp32"
    """The default, which the other tolerances are measured against."""
    FP16 = "fp16"
    """IEEE half precision."""
    BF16 = "bf16"
    """bfloat16."""
    INT8 = "int8"
    """Linear layers in 8-bit integers, with a scale for each row at run time; all else in float32."""


# The tolerances of torch.testing.assert_close for float32.
FP32_TOLERANCE = Tolerance(rtol=1.3e-6, atol=1e-5)
# Largest accepted differences from eager PyTorch in float32, on standard normal inputs. Those of fp16 and
# bf16 are a few units in the last place.
TOLERANCES = {
    Precision.FP32: FP32_TOLERANCE,
    Precision.FP16: Tolerance(rtol=5e-3, atol=5e-3),
    Precision.BF16: Tolerance(rtol=4e-2, atol=4e-2),
    Precision.INT8: Tolerance(rtol=5e-2, atol=1e-1),
}
# Those of text encoders, in which the differences of many layers add up.
INT8_SCORES = Tolerance(rtol=1e-1, atol=1e-1)
ENCODER_TOLERANCES = {
    **TOLERANCES,
    Precision.FP32: Tolerance(rtol=1e-4, atol=5e-5),
    Precision.FP16: Tolerance(rtol=2e-2, atol=2e-2),
    Precision.BF16: Tolerance(rtol=1e-1, atol=1e-1),
    Precision.INT8: Tolerance(rtol=1e-1, atol=1e-1, cosine=0.97),
}
