"""Bytes on the wire to arrays and back, without copying where NumPy allows it."""

from collections.abc import Iterable, Sequence

import numpy as np

from server.engine.errors import InvalidRequestError
from server.engine.values import Array


def from_bytes(field: str, data: bytes, dtype: np.dtype[np.generic], shape: Sequence[int]) -> Array:
    """A read-only view of little-endian bytes as an array of that type and shape.

    Raises:
        InvalidRequestError: There are more or fewer bytes than the shape needs.
    """
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if len(data) != expected:
        shown = " x ".join(map(str, shape))
        raise InvalidRequestError(
            field, f"holds {len(data)} bytes; {shown} elements of {dtype.name} are {expected} bytes"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def to_bytes(arrays: Iterable[Array]) -> bytes:
    """Arrays, row-major and concatenated."""
    parts = [array.tobytes() for array in arrays]
    return parts[0] if len(parts) == 1 else b"".join(parts)
