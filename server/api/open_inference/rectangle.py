"""The rectangular tensors of a request, (B, T, ...), as sequences without their padding."""

from collections.abc import Mapping

import numpy as np

from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    KEY_LENGTHS,
    QUERY_LENGTHS,
    GraphKind,
    TensorSpec,
)
from attention_serving.server.api.tensors import alternatives, mask_shapes
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged

# The length of each sequence, by symbolic axis.
Cuts = Mapping[str, tuple[int, ...]]


class Rectangle:
    """The tensors of a request: their sequences and shared axes agree.

    Attributes:
        sizes: Size of each symbolic axis, padding included.
        query_length: That of the query; 0 if the request lacks it.
    """

    def __init__(self, model: LoadedModel, tensors: dict[str, Array]) -> None:
        self._tensors = tensors
        self._model = model
        self._query_axis, self._key_axis = (str(model.inputs[at].axes[1]) for at in (0, -1))
        masked = model.manifest.graphs.get(GraphKind.MASK)
        self._mask_axes = masked.inputs[-1].axes[2:] if masked else (self._query_axis, self._key_axis)
        self.sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            if name not in model.inputs_by_name:
                takes = f"model {model.name!r} takes {model.input_names}"
                raise InvalidRequestError(name, f"is not an input; {takes}")
            self._bind(model.inputs_by_name[name], tensor)
        self.query_length = self.sizes.get(self._query_axis, 0)

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

    def cuts(self, given: Mapping[str, Array]) -> Cuts:
        """Checks `query_lengths` and `key_lengths`, each B lengths, and returns those that are given."""
        axes = {QUERY_LENGTHS: self._query_axis, KEY_LENGTHS: self._key_axis}
        batch, cuts = self.sizes.get(BATCH_AXIS, 0), {}
        for name, lengths in given.items():
            longest = self.sizes.get(axes[name], 0)
            if lengths.dtype.kind not in "iu" or lengths.shape != (batch,) or batch == 0:
                raise InvalidRequestError(name, f"must be integers, one for each of {batch} sequences")
            if not 1 <= lengths.min() <= lengths.max() <= longest:
                raise InvalidRequestError(name, f"must lie in 1..{longest}")
            cuts[axes[name]] = tuple(lengths.tolist())
        return cuts

    def rows(self, spec: TensorSpec, cuts: Cuts) -> Ragged:
        """The rows of (B, T, ...) within the lengths of their axis."""
        tensor = self._tensors[spec.name]
        batch, length, *row = tensor.shape
        cut = cuts.get(str(spec.axes[1]))
        if cut is None:
            return Ragged(tensor.reshape(batch * length, *row), (length,) * batch)
        return Ragged(np.concatenate([rows[:end] for rows, end in zip(tensor, cut, strict=True)]), cut)

    def mask(self, mask: Array, cuts: Cuts) -> Mask:
        """The flags of (B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) within the lengths."""
        if GraphKind.MASK not in self._model.manifest.graphs:
            raise InvalidRequestError(ATTENTION_MASK, f"model {self._model.name!r} does not take a mask")
        batch = self.sizes.get(BATCH_AXIS, 0)
        query_length, key_length = (self.sizes.get(str(axis), 0) for axis in self._mask_axes)
        expected = mask_shapes(self._model.manifest, query_length, key_length, batch)
        kind = expected.get(mask.shape)
        if kind is None or mask.dtype != np.bool_:
            says = f"is {mask.dtype.name} {mask.shape}; must be bool {alternatives(expected)}"
            raise InvalidRequestError(ATTENTION_MASK, says)
        if not cuts:
            return Mask(kind, mask.ravel())
        whole = (None,) * batch
        query, key = (cuts.get(str(axis), whole) for axis in self._mask_axes)
        parts = [
            (part[:end] if kind is MaskKind.KEYS else part[..., :last, :end]).ravel()
            for part, last, end in zip(mask, query, key, strict=True)
        ]
        return Mask(kind, np.concatenate(parts))
