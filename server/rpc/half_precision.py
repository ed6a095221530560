"""FP16 and BF16 on the wire: half the bytes of the vectors that models take and return as FP32."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from attention_serving.server.engine.types import Array
from attention_serving.server.rpc.allowance import Allowance
from attention_serving.server.rpc.tensors import from_bytes

FLOAT32 = np.dtype("<f4")
# The bits of bfloat16, which NumPy lacks: the upper half of those of float32.
HALF_BITS = 16
QUIET_NAN = np.uint32(0x400000)


class WireFloat(Enum):
    """How real numbers are sent; the value is the type of their bits in NumPy."""

    FP32 = FLOAT32
    FP16 = np.dtype("<f2")
    BF16 = np.dtype("<u2")


def widened(
    field: str, data: bytes | memoryview, wire: WireFloat, shape: tuple[int, ...], allowance: Allowance
) -> Array:
    """The numbers of a tensor as float32, without loss. FP32 is not copied.

    Raises:
        InvalidRequestError: The number of bytes does not fit the shape.
        LimitExceededError: The tensor would be too large.
        OverloadedError: The memory of the copy is not available.
    """
    type_name = "bfloat16" if wire is WireFloat.BF16 else ""
    numbers = from_bytes(field, data, wire.value, shape, type_name)
    if wire is WireFloat.FP32:
        return numbers
    allowance.take(field, numbers.size * FLOAT32.itemsize)
    if wire is WireFloat.FP16:
        return numbers.astype(FLOAT32)
    bits = numbers.astype("<u4")
    bits <<= HALF_BITS
    return bits.view(FLOAT32)


def narrowed(array: Array, wire: WireFloat) -> Array:
    """An array in the type of the wire, rounded to the nearest number; ties go to the even one.

    What is too large for FP16 becomes infinite. Arrays of other types than float32 stay as they are.
    """
    if wire is WireFloat.FP32 or array.dtype != FLOAT32:
        return array
    if wire is WireFloat.FP16:
        with np.errstate(over="ignore"):
            return array.astype(wire.value)
    return _bfloat16(np.ascontiguousarray(array))


def _bfloat16(array: Array) -> NDArray[np.uint16]:
    """The bits of float32 numbers, rounded to their upper half."""
    bits = array.view("<u4")
    # Adds a half of what the last remaining bit stands for, or just less than that if the bit is even.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> HALF_BITS) & np.uint32(1)))
    # The sum of a NaN could overflow to a number.
    nan = np.isnan(array)
    if nan.any():
        rounded[nan] = bits[nan] | QUIET_NAN
    upper: NDArray[np.uint16] = (rounded >> HALF_BITS).astype(WireFloat.BF16.value)
    return upper
