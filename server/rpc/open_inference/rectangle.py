"""The rectangular tensors of a request, (B, T, ...), as sequences without their padding."""

import numpy as np

from artifact.manifest import ATTENTION_MASK, BATCH_AXIS, KEY_LENGTHS, TensorSpec
from server.engine.errors import InvalidRequestError
from server.engine.model import LoadedModel
from server.engine.types import Array, Mask, MaskKind, Ragged


class Rectangle:
    """The tensors of a request: their sequences and shared axes agree.

    Attributes:
        sizes: Size of each symbolic axis, padding included.
    """

    def __init__(self, model: LoadedModel, tensors: dict[str, Array]) -> None:
        self._tensors = tensors
        self._heads = model.manifest.num_heads
        self._query_axis, self._key_axis = (str(model.inputs[at].axes[1]) for at in (0, -1))
        self.sizes: dict[str, int] = {}
        specs = model.inputs_by_name
        for name, tensor in tensors.items():
            if name not in specs:
                raise InvalidRequestError(
                    name, f"is not an input; model {model.name!r} takes {model.input_names}"
                )
            self._bind(specs[name], tensor)

    def _bind(self, spec: TensorSpec, tensor: Array) -> None:
        if tensor.dtype == object:
            raise InvalidRequestError(spec.name, f"is BYTES; the model takes {spec.data_type}")
        if tensor.ndim != len(spec.axes):
            raise InvalidRequestError(spec.name, f"has {tensor.ndim} axes; the model takes {len(spec.axes)}")
        for axis, size in zip(spec.axes, tensor.shape, strict=True):
            if isinstance(axis, str) and self.sizes.setdefault(axis, size) != size:
                raise InvalidRequestError(
                    spec.name, f"has {axis} {size}; it must be {self.sizes[axis]}, as in another input"
                )

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk, padding included; 0 if the request lacks the input."""
        return self.sizes.get(self._query_axis, 0), self.sizes.get(self._key_axis, 0)

    def key_lengths(self, lengths: Array) -> tuple[int, ...]:
        """Checks and returns the B key lengths."""
        batch, (_, longest) = self.sizes.get(BATCH_AXIS, 0), self.lengths
        if lengths.dtype.kind not in "iu" or lengths.shape != (batch,) or batch == 0:
            raise InvalidRequestError(KEY_LENGTHS, f"must be integers, one for each of {batch} sequences")
        if not 1 <= lengths.min() <= lengths.max() <= longest:
            raise InvalidRequestError(KEY_LENGTHS, f"must lie in 1..{longest}")
        return tuple(lengths.tolist())

    def rows(self, spec: TensorSpec, cut: tuple[int, ...] | None) -> Ragged:
        """The rows of (B, T, ...); of an input with the key's axis, only those within the key lengths."""
        tensor = self._tensors[spec.name]
        batch, length, *row = tensor.shape
        if cut is None or spec.axes[1] != self._key_axis:
            return Ragged(tensor.reshape(batch * length, *row), (length,) * batch)
        return Ragged(np.concatenate([rows[:end] for rows, end in zip(tensor, cut, strict=True)]), cut)

    def mask(self, mask: Array, cut: tuple[int, ...] | None) -> Mask:
        """The flags of (B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) within the key lengths."""
        batch, (query_length, key_length) = self.sizes.get(BATCH_AXIS, 0), self.lengths
        expected = {
            (batch, key_length): MaskKind.KEYS,
            (batch, query_length, key_length): MaskKind.PAIRS,
            (batch, 1, query_length, key_length): MaskKind.PAIRS,
            (batch, self._heads, query_length, key_length): MaskKind.HEADS,
        }
        kind = expected.get(mask.shape)
        if kind is None or mask.dtype != np.bool_:
            shapes = " or ".join(map(str, expected))
            raise InvalidRequestError(
                ATTENTION_MASK, f"is {mask.dtype.name} {mask.shape}; must be bool {shapes}"
            )
        if cut is None:
            return Mask(kind, mask.ravel())
        own_rows = kind is not MaskKind.KEYS and self._query_axis == self._key_axis
        parts = [
            (part[..., :end, :end] if own_rows else part[..., :end]).ravel()
            for part, end in zip(mask, cut, strict=True)
        ]
        return Mask(kind, np.concatenate(parts))
