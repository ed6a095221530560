"""Arguments of any array library as NumPy arrays, and numbers in the types that messages carry.

Messages carry real numbers as FP32, or as FP16 or BF16 with half the bytes.
"""

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, FloatArray, Wire
from attention_client.errors import invalid

# Numbers in a message are little-endian.
WIRE_FLOAT = np.dtype("<f4")
DATA_TYPES: dict[str, pb.DataType.ValueType] = {
    "fp32": pb.DATA_TYPE_FP32,
    "fp16": pb.DATA_TYPE_FP16,
    "bf16": pb.DATA_TYPE_BF16,
}
_FP16, _BITS, _BF16_BITS = np.dtype("<f2"), np.dtype("<u4"), np.dtype("<u2")
_DTYPES: dict[pb.DataType.ValueType, np.dtype[Any]] = {
    pb.DATA_TYPE_FP32: WIRE_FLOAT,
    pb.DATA_TYPE_FP16: _FP16,
    pb.DATA_TYPE_BF16: _BF16_BITS,
    pb.DATA_TYPE_INT8: np.dtype(np.int8),
    pb.DATA_TYPE_UINT8: np.dtype(np.uint8),
    pb.DATA_TYPE_BITS: np.dtype(np.uint8),
}
# NumPy lacks bfloat16, whose bits are the upper half of those of float32.
_HALF_BITS = np.uint32(16)
_QUIET_NAN = np.uint32(0x400000)


def as_floats(field: str, value: object) -> Array:
    """Converts real numbers to float32; float32 numbers are not copied.

    Raises:
        InvalidArgumentError: The elements are not real numbers, or a finite one exceeds the range of float32.
    """
    array = as_array(field, value)
    if array.dtype == WIRE_FLOAT:
        return array
    # An extension type such as ml_dtypes.bfloat16 has kind V; it is real if it converts to float32.
    real = array.dtype.kind in "fiu" or (array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32))
    if not real:
        raise invalid(field, "real numbers", f"dtype {array.dtype}")
    try:
        with np.errstate(over="raise"):
            return array.astype(WIRE_FLOAT)
    except FloatingPointError:
        raise invalid(
            field,
            f"numbers in the range of float32, up to {np.finfo(np.float32).max:.6g} in magnitude, or inf",
            f"{np.abs(array[np.isfinite(array)]).max():.6g}",
        ) from None


def as_integers(field: str, value: object) -> NDArray[np.int64]:
    """Converts integers to int64.

    Raises:
        InvalidArgumentError: The elements are not integers, or one exceeds the range of int64.
    """
    array = as_array(field, value)
    if array.dtype.kind not in "iu":
        raise invalid(field, "integers", f"dtype {array.dtype}")
    largest = np.iinfo(np.int64).max
    if array.dtype == np.uint64 and array.size and array.max() > largest:
        raise invalid(field, f"integers up to {largest}", array.max())
    return array.astype(np.int64, copy=False)


def as_booleans(field: str, value: object) -> NDArray[np.bool_]:
    """Accepts booleans only: libraries disagree on whether 1, 0 or -inf excludes a key.

    Raises:
        InvalidArgumentError: The elements are not booleans.
    """
    array = as_array(field, value)
    if array.dtype.kind != "b":
        expected = "booleans (in JSON, true and false), True = the query may attend to the key"
        raise invalid(field, expected, f"dtype {array.dtype}")
    return array


def as_array(field: str, value: object) -> Array:
    """Converts anything that NumPy can read, and PyTorch tensors that it cannot.

    Raises:
        InvalidArgumentError: The value cannot be read, for example because its rows differ in length.
    """
    if type(value) is np.ndarray:
        return value
    readable = _readable(field, value)
    try:
        return np.asarray(readable)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        actual = f"a {type(value).__name__} that NumPy cannot read ({error})"
        raise invalid(field, "an array", actual) from None


def items_of(value: object) -> list[Any] | tuple[Any, ...] | None:
    """The items of a list, a tuple, a pandas Series or another one-dimensional array of objects or texts."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray):
        array = value
    elif getattr(value, "ndim", None) == 1 and hasattr(value, "__array__") and not _is_tensor(value):
        array = np.asarray(value)
    else:
        return None
    return array.tolist() if array.dtype.kind in "OU" and array.ndim == 1 else None


def _readable(field: str, value: Any) -> Any:
    """A PyTorch tensor as one that NumPy can read; the gradient's graph is not needed to compute a result."""
    if isinstance(value, list | tuple) and value and _is_tensor(value[0]):
        return [as_array(field, item) for item in value]
    if not _is_tensor(value):
        return value
    if value.device.type != "cpu":
        raise invalid(field, "a tensor on the CPU; move it with .cpu()", f"a tensor on {value.device}")
    tensor = value.detach()
    return tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor  # NumPy lacks bfloat16


def _is_tensor(value: object) -> bool:
    """Whether the value is a PyTorch tensor; without importing PyTorch, which this package does not need."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def narrow(field: str, array: Array, wire: Wire) -> Array:
    """float32 numbers in the type of the wire, rounded to the nearest; ties go to the even number.

    Raises:
        InvalidArgumentError: A finite number exceeds the range of the type.
    """
    if wire == "fp32":
        return array
    if wire == "bf16":
        return _to_bf16(np.ascontiguousarray(array))
    with np.errstate(over="ignore"):
        halves = array.astype(_FP16)
    if (overflows := np.isinf(halves) & np.isfinite(array)).any():
        expected = f"numbers up to {np.finfo(_FP16).max:.6g} in magnitude, or inf, to be sent as fp16"
        raise invalid(field, expected, f"{np.abs(array[overflows]).max():.6g}")
    return halves


def widen(data_type: pb.DataType.ValueType, data: bytes) -> Array:
    """The float32 numbers or 8-bit integers of a response; a read-only view unless they have 16 bits.

    Raises:
        LookupError: The type is none of these.
        ValueError: The bytes are not a whole number of elements.
    """
    dtype = _DTYPES[data_type]
    numbers = np.frombuffer(data, dtype)
    if dtype.itemsize == 1:
        return numbers
    if dtype != _BF16_BITS:
        return numbers.astype(WIRE_FLOAT, copy=False)
    return (numbers.astype(_BITS) << _HALF_BITS).view(WIRE_FLOAT)


def split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Views of consecutive elements, one in each shape."""
    ends = accumulate(map(math.prod, shapes), initial=0)
    return [
        flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]


def _to_bf16(array: FloatArray) -> NDArray[np.uint16]:
    bits = array.view(_BITS)
    # Adds half of what the last bit that is kept stands for, or just less than that if the bit is even.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> _HALF_BITS) & np.uint32(1)))
    # The sum of a NaN could overflow to a number.
    rounded = np.where(np.isnan(array), bits | _QUIET_NAN, rounded)
    upper: NDArray[np.uint16] = (rounded >> _HALF_BITS).astype(_BF16_BITS)
    return upper
