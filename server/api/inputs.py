"""Inputs by name, in both protocols: one tensor for each sequence, or one with the batch axis for all."""

from collections.abc import Mapping, Sequence

import numpy as np

from attention_serving.artifact.manifest import ATTENTION_MASK, GraphKind
from attention_serving.server.api.tensors import Shape
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged


def check_once(name: str, inputs: Mapping[str, object]) -> None:
    """Checks that an input is not among those before.

    Raises:
        InvalidRequestError: It is.
    """
    if name in inputs:
        raise InvalidRequestError(name, "is sent twice; each input must be sent once")


def ragged(name: str, shapes: Sequence[Shape], elements: Array, rank: int, limits: Limits) -> Ragged:
    """Sequences (T, ...) of `rank` axes, whose rows all have the same shape.

    Args:
        name: Name of the input.
        shapes: A shape for each sequence; or one, with the batch axis.
        elements: The elements of all sequences.
        rank: Number of axes of a sequence.
        limits: The server's limits.

    Raises:
        InvalidRequestError: The shapes are not those of sequences.
        LimitExceededError: There are too many.
    """
    if len(shapes) == 1 and len(shapes[0]) == rank + 1:
        ((batch, *sequence),) = shapes
        limits.check_sequences(name, batch)
        shapes = [tuple(sequence)] * batch
    if (axes := len(shapes[0])) != rank:
        message = f"has a tensor of {axes} axes; one sequence has {rank}, and one batch has {rank + 1}"
        raise InvalidRequestError(name, message)
    width = shapes[0][1:]
    for index, shape in enumerate(shapes):
        if shape[1:] != width:
            message = f"sequence {index} has rows of shape {shape[1:]}; those of sequence 0 have {width}"
            raise InvalidRequestError(name, message)
    lengths = tuple([shape[0] for shape in shapes])
    return Ragged(elements.reshape(sum(lengths), *width), lengths)


def mask(
    shapes: Sequence[Shape],
    flags: Array,
    model: LoadedModel,
    inputs: Mapping[str, Ragged],
    *,
    has_batch: bool,
) -> Mask | None:
    """The mask of each sequence: (Tk,), (Tq, Tk), (1, Tq, Tk) or (H, Tq, Tk).

    Args:
        shapes: The shape of each; or one, with the batch axis, if the inputs have it.
        flags: The elements of all of them.
        model: The model, which takes a mask.
        inputs: The other inputs. The mask is None if they lack one of the model's, which is refused later.
        has_batch: Whether the inputs have the batch axis.

    Raises:
        InvalidRequestError: The masks are not those of the sequences.
    """
    lengths = {spec.axes[1]: inputs[spec.name].lengths for spec in model.inputs if spec.name in inputs}
    *_, query_axis, key_axis = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes
    if query_axis not in lengths or key_axis not in lengths:
        return None
    queries, keys = lengths[query_axis], lengths[key_axis]
    batch: Shape = ()
    if has_batch and len(shapes) == 1:
        queries, keys, batch = queries[:1], keys[:1], (len(queries),)
    if len(shapes) != len(queries):
        message = f"contains {len(shapes)} masks for {len(queries)} sequences"
        raise InvalidRequestError(ATTENTION_MASK, message)
    kinds = set[MaskKind]()
    for shape, query, key in zip(shapes, queries, keys, strict=False):
        expected = {
            (*batch, key): MaskKind.KEYS,
            (*batch, query, key): MaskKind.PAIRS,
            (*batch, 1, query, key): MaskKind.PAIRS,
        }
        if heads := model.manifest.num_heads:
            expected[*batch, heads, query, key] = MaskKind.HEADS
        if shape not in expected or flags.dtype != np.bool_:
            *first, last = map(str, expected)
            message = f"is {flags.dtype.name} {shape}; must be bool {', '.join(first)} or {last}"
            raise InvalidRequestError(ATTENTION_MASK, message)
        kinds.add(expected[shape])
    if len(kinds) > 1:
        message = "has masks of different numbers of axes; all must have the same"
        raise InvalidRequestError(ATTENTION_MASK, message)
    return Mask(kinds.pop(), flags.ravel())
