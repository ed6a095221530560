"""Which element types an argument may have, and what they become: changes with the types on the wire."""

import numpy as np
from numpy.typing import NDArray

from attention_client._values import Array
from attention_client.errors import invalid

# On the wire every number is little-endian.
WIRE_FLOAT = np.dtype("<f4")


def as_floats(field: str, value: object) -> Array:
    """Converts real numbers to float32 and copies nothing that is float32 already.

    Raises:
        InvalidArgumentError: The elements are not real numbers.
    """
    array = as_array(field, value)
    # An extension type such as ml_dtypes.bfloat16 is of kind V, and real where it widens to float32.
    real = array.dtype.kind in "fiu" or (array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32))
    if not real:
        raise invalid(field, "real numbers", f"dtype {array.dtype}")
    return array.astype(WIRE_FLOAT, copy=False)


def as_integers(field: str, value: object) -> NDArray[np.int64]:
    """Converts integers to int64.

    Raises:
        InvalidArgumentError: The elements are not integers.
    """
    array = as_array(field, value)
    if array.dtype.kind not in "iu":
        raise invalid(field, "integers", f"dtype {array.dtype}")
    return array.astype(np.int64, copy=False)


def as_booleans(field: str, value: object) -> NDArray[np.bool_]:
    """Takes booleans only: whether 1 or 0 or -inf hides a key differs from library to library.

    Raises:
        InvalidArgumentError: The elements are not booleans.
    """
    array = as_array(field, value)
    if array.dtype.kind != "b":
        raise invalid(field, "booleans, True where a query may attend to a key", f"dtype {array.dtype}")
    return array


def as_array(field: str, value: object) -> Array:
    """Makes an array of anything that NumPy can read.

    Raises:
        InvalidArgumentError: NumPy cannot read it, for example because its rows differ in length.
    """
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{type(value).__name__} that NumPy cannot read ({error})"
        raise invalid(field, "an array", found) from error
