"""The rows of a context: read from arguments, and put into messages."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_client._calls.arrays import as_booleans
from attention_client._calls.attention import fill_vectors
from attention_client._calls.sequences import InputForm, encode_mask, vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, Arrays, Wire
from attention_client.errors import invalid


class Rows(NamedTuple):
    """The rows of one sequence, which belong to the client: they may be sent again much later.

    Attributes:
        key: float32, (T, d).
        value: float32, (T, dv); None for models that do not separate it from the key.
        mask: (T,): False hides a row from every query.
    """

    key: Array
    value: Array | None
    mask: NDArray[np.bool_]


def read_rows(key: Arrays, value: Arrays | None, mask: Arrays | None) -> Rows:
    """Reads (T, d) of real numbers, and (T,) booleans.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape.
    """
    keys = _one_sequence("key", key)
    flags = np.ones(len(keys), bool) if mask is None else as_booleans("mask", mask).copy()
    if flags.shape != (len(keys),):
        raise invalid("mask", f"shape {(len(keys),)}, one for each row of the key", f"shape {flags.shape}")
    return Rows(keys, None if value is None else _one_sequence("value", value), flags)


def _one_sequence(field: str, value: Arrays) -> Array:
    sequences = vectors(field, value)
    if sequences.form is not InputForm.SINGLE:
        raise invalid(field, "one sequence, (T, d)", sequences.form.value)
    return sequences.pieces[0].copy()


def fill_rows(
    request: pb.PutContextRequest | pb.AppendContextRequest, parts: Sequence[Rows], wire: Wire
) -> None:
    """Fills the message in place with the rows of all parts, as one sequence."""
    keys, values, masks = zip(*parts, strict=True)
    fill_vectors(request.key, vectors("key", np.concatenate(keys)), wire)
    if values[0] is not None:
        fill_vectors(request.value, vectors("value", np.concatenate(values)), wire)
    if not (mask := np.concatenate(masks)).all():
        request.mask.CopyFrom(encode_mask(mask, InputForm.SINGLE, ()))
