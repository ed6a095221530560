"""Converts an argument of any array library to a NumPy array of the element type that requests carry."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_client._values import Array
from attention_client.errors import invalid

# Numbers in a message are little-endian.
WIRE_FLOAT = np.dtype("<f4")


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
        raise invalid(field, "booleans, True = the query may attend to the key", f"dtype {array.dtype}")
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
        found = f"a {type(value).__name__} that NumPy cannot read ({error})"
        raise invalid(field, "an array", found) from error


def items_of(value: object) -> list[Any] | tuple[Any, ...] | None:
    """The items of a list, a tuple, a pandas Series or another one-dimensional array of objects; or None."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray):
        array = value
    elif getattr(value, "ndim", None) == 1 and hasattr(value, "__array__") and not _is_tensor(value):
        array = np.asarray(value)
    else:
        return None
    return list(array) if array.dtype == object and array.ndim == 1 else None


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
