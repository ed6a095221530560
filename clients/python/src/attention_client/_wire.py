"""The types in which requests and responses carry real numbers: FP32, or FP16 or BF16 at half the bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_client._arrays import WIRE_FLOAT
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, FloatArray, Wire
from attention_client.errors import InternalError, invalid

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
}
# NumPy lacks bfloat16, whose bits are the upper half of those of float32.
_HALF_BITS = np.uint32(16)
_QUIET_NAN = np.uint32(0x400000)


def read_wire(wire: object) -> Wire:
    """The type of real numbers that a client was given.

    Raises:
        InvalidArgumentError: It is not the name of one.
    """
    if not isinstance(wire, str) or wire not in DATA_TYPES:
        raise invalid("wire", f"one of {', '.join(map(repr, DATA_TYPES))}", repr(wire))
    return wire  # type: ignore[return-value]  # one of the literals


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
        found = array.astype(_FP16)
    if (lost := np.isinf(found) & np.isfinite(array)).any():
        expected = f"numbers up to {np.finfo(_FP16).max:.6g} in magnitude, or inf, to be sent as fp16"
        raise invalid(field, expected, f"{np.abs(array[lost]).max():.6g}")
    return found


def widen(field: str, data_type: pb.DataType.ValueType, data: bytes) -> FloatArray:
    """The float32 numbers of a response; a read-only view if they were sent as FP32.

    Raises:
        InternalError: The bytes are not numbers of that type.
    """
    dtype = _DTYPES.get(data_type)
    if dtype is None:
        raise unreadable(field, f"its data type is {data_type}; this client reads FP32, FP16 and BF16")
    if len(data) % dtype.itemsize:
        raise unreadable(field, f"{len(data)} bytes are not a whole number of elements")
    numbers = np.frombuffer(data, dtype)
    if dtype != _BF16_BITS:
        return numbers.astype(WIRE_FLOAT, copy=False)
    return (numbers.astype(_BITS) << _HALF_BITS).view(WIRE_FLOAT)


def _to_bf16(array: FloatArray) -> NDArray[np.uint16]:
    bits = array.view(_BITS)
    # Adds half of what the last bit that is kept stands for, or just less than that if the bit is even.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> _HALF_BITS) & np.uint32(1)))
    # The sum of a NaN could overflow to a number.
    rounded = np.where(np.isnan(array), bits | _QUIET_NAN, rounded)
    upper: NDArray[np.uint16] = (rounded >> _HALF_BITS).astype(_BF16_BITS)
    return upper


def unreadable(field: str, why: str) -> InternalError:
    """The error of a response that contradicts itself."""
    return InternalError(f"the server's response cannot be read: {field}: {why}", field=field)
