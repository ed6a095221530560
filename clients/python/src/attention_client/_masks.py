"""Packs boolean masks into the bits that requests carry.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, H heads. True = may attend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_client._arrays import as_booleans, items_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._sequences import InputForm
from attention_client._validation import type_name
from attention_client._values import Arrays
from attention_client.errors import invalid

_Mask: TypeAlias = NDArray[np.bool_]
_KINDS = (pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.AttentionMask.KIND_HEADS)
_SHAPES = "(Tk,), (Tq, Tk) or (H, Tq, Tk)"


@dataclass(frozen=True, slots=True)
class MaskExtent:
    """The rows that the mask of one sequence covers, as (Tq, Tk).

    Attributes:
        given: The rows as the caller gave them, including padding.
        valid: The rows that are sent.
    """

    given: tuple[int, int]
    valid: tuple[int, int]


def encode_mask(
    mask: Arrays, form: InputForm, leading: tuple[int, ...], extents: Sequence[MaskExtent | None]
) -> pb.AttentionMask:
    """Packs the masks of all sequences, eight to a byte.

    Args:
        mask: For one sequence (Tk,), (Tq, Tk) or (H, Tq, Tk); for a batch the same after its leading axes;
            for a list a list of masks as for one sequence, all of one rank and one H.
        form: The form of the query, and so of the mask.
        leading: Sizes of the query's leading axes; see Sequences.
        extents: The rows that each sequence's mask covers; None if only the server knows, as for text.

    Raises:
        InvalidArgumentError: A mask is not boolean, or it has another shape.
    """
    pieces = _per_sequence(mask, form, leading)
    spread = {piece.shape[:-2] if piece.ndim > 1 else None for _, piece in pieces}  # None, () or (H,)
    if len(spread) != 1:
        found = ", ".join(str(piece.shape) for _, piece in pieces)
        raise invalid("mask", "masks of one rank and one number of heads", f"shapes {found}")
    cut = [_cut(name, piece, extent) for (name, piece), extent in zip(pieces, extents, strict=True)]
    bits = np.concatenate(cut) if len(cut) > 1 else cut[0]
    kind = _KINDS[pieces[0][1].ndim - 1]
    return pb.AttentionMask(kind=kind, bits=np.packbits(bits, bitorder="little").tobytes())


def _per_sequence(mask: Arrays, form: InputForm, leading: tuple[int, ...]) -> list[tuple[str, _Mask]]:
    """One mask per sequence, each with its name for errors."""
    if form is InputForm.LIST:
        return _from_list(mask, leading[0])
    array = as_booleans("mask", mask)
    if array.shape[: len(leading)] != leading:
        raise invalid("mask", f"{_SHAPES} after the query's leading axes {leading}", f"shape {array.shape}")
    _check_rank("mask", array, leading)
    own = array.shape[len(leading) :]  # (Tk,), (Tq, Tk) or (H, Tq, Tk)
    names = [f"mask{list(index) if index else ''}" for index in np.ndindex(leading)]
    return list(zip(names, array.reshape(len(names), *own), strict=True))


def _from_list(mask: Arrays, count: int) -> list[tuple[str, _Mask]]:
    masks = items_of(mask)
    if masks is None:
        raise invalid("mask", "a list of masks, because the query is a list", type_name(mask))
    if len(masks) != count:
        raise invalid("mask", f"{count} masks, one per sequence", len(masks))
    names = [f"mask[{index}]" for index in range(count)]
    arrays = [as_booleans(name, item) for name, item in zip(names, masks, strict=True)]
    for name, array in zip(names, arrays, strict=True):
        _check_rank(name, array)
    return list(zip(names, arrays, strict=True))


def _check_rank(name: str, mask: _Mask, leading: tuple[int, ...] = ()) -> None:
    if not 1 <= mask.ndim - len(leading) <= len(_KINDS):
        raise invalid(name, f"{_SHAPES} for each sequence", f"shape {mask.shape}")


def _cut(name: str, mask: _Mask, extent: MaskExtent | None) -> _Mask:
    """Checks a mask's shape and returns the bits of its valid rows and columns, flat."""
    if extent is None:
        return mask.ravel()
    given = extent.given[-mask.ndim :]  # (Tk,) for the first rank, (Tq, Tk) for the others
    if mask.shape[-len(given) :] != given:
        raise invalid(name, f"{_SHAPES} with Tq, Tk = {extent.given}", f"shape {mask.shape}")
    queries, keys = extent.valid
    return (mask[:keys] if mask.ndim == 1 else mask[..., :queries, :keys]).ravel()
