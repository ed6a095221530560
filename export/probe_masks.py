"""Runs a module with masks in eager PyTorch before its export: what they hide changes no result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from attention_serving.artifact.golden import Arrays
from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    KEY_LENGTHS,
    QUERY_LENGTHS,
    TensorSpec,
    all_sizes,
)
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import AdaptedModule, Mask, Meaning
from attention_serving.export.errors import ExportError
from attention_serving.export.probe import first_sizes, outputs, rng
from attention_serving.export.signature import Signature, random_inputs

# Rows of the longest sequence of a padded batch. Layers may carry what is hidden over hundreds of rows.
PADDED_ROWS = (3, 17, 65, 513)
MOST_REMAINDERS = 8


def equal_without_masks(
    module: AdaptedModule, masks: Sequence[Mask], signature: Signature, tolerance: Tolerance
) -> bool:
    """Whether a module computes the same without masks that hide nothing."""
    inputs = random_inputs(signature, first_sizes(signature), rng())
    masked = outputs(module, signature, inputs)
    try:
        with module.using(masks):
            without = outputs(module, signature, inputs)
    except ExportError:
        return False
    return all(tolerance.holds(without[name], masked[name]) for name in masked)


def check_masks(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules whose results depend on rows that a mask of keys hides.

    Raises:
        ExportError: The result of a sequence depends on such rows.
    """
    for mask in module.masks:
        axis = mask.sequence_axes[-1]
        if len(mask.sequence_axes) == 1 and not can_be_padded(module, signature, tolerance, [axis]):
            raise _depends_on_hidden(mask, signature)


def check_pairs(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses a mask of query and key rows that says the opposite of what is stated.

    Results may depend on a hidden row in another way, such as through a layer without the mask.

    Raises:
        ExportError: Results depend on a row that the mask hides, and would not with the opposite meaning.
    """
    mask = next(mask for mask in module.masks if len(mask.sequence_axes) > 1)
    if mask.meaning is Meaning.ADDED or can_be_padded(module, signature, tolerance):
        return
    opposite = replace(mask, meaning=mask.opposite)
    with module.using([opposite if candidate is mask else candidate for candidate in module.masks]):
        if can_be_padded(module, signature, tolerance):
            raise _depends_on_hidden(mask, signature)


def _depends_on_hidden(mask: Mask, signature: Signature) -> ExportError:
    appends = any(formula.extra > 0 for formula in signature.derived_axes.values())
    advice = "; if the module appends rows, which then follow the padding, put them first" if appends else ""
    remedy = "Mask"
    if mask.meaning is not Meaning.LENGTHS:
        opposite = f"masks={{{mask.name!r}: {mask.opposite.value!r}}}"
        remedy = f"If it means the opposite, state {opposite}; otherwise mask"
    return ExportError(
        f"{mask.name} {mask.axes}, {mask.meaning.value!r}: the result of a sequence depends on rows that "
        f"{mask.name} hides. {remedy} these rows everywhere, or "
        f"pass masks={{{mask.name!r}: None}}, which makes it an ordinary input{advice}"
    )


def can_be_padded(
    module: nn.Module, signature: Signature, tolerance: Tolerance, axes: Sequence[str] | None = None
) -> bool:
    """Whether results do not depend on rows after the lengths of a sequence, on some axes or on all.

    On some axes, such rows have random values, which shows what masks mean. On all, they are also zeros, as
    servers pad: a logarithm of them could spoil other rows in spite of a mask.
    """
    padded = signature.sequence_axes if axes is None else axes
    return all(
        _is_equal_when_padded(module, signature, tolerance, padded, rows, zeros=zeros)
        for rows in PADDED_ROWS
        for zeros in (False, True)[: 1 + (axes is None)]
    )


def _is_equal_when_padded(
    module: nn.Module,
    signature: Signature,
    tolerance: Tolerance,
    axes: Sequence[str],
    rows: int,
    *,
    zeros: bool,
) -> bool:
    """Runs sequences together and alone: one of so many rows, one of half of them, one of a row.

    Of strided modules, sequences of each remainder are among them.
    """
    longest = {axis: signature.clip(axis, rows + at) for at, axis in enumerate(signature.sequence_axes)}
    strides = [min(derived.stride, MOST_REMAINDERS) for derived in signature.derived_axes.values()]
    lengths_of_parts = [rows // 2, 1, *(rows // 2 + at for at in range(1, max(strides, default=1)))]
    parts = [
        longest,
        *(
            {**longest, **{axis: min(signature.clip(axis, length), longest[axis]) for axis in axes}}
            for length in lengths_of_parts
        ),
    ]
    sizes = {**first_sizes(signature), **longest, BATCH_AXIS: len(parts)}
    inputs = random_inputs(signature, sizes, rng())
    for name in inputs.keys() & {KEY_LENGTHS, QUERY_LENGTHS, *signature.lengths}:
        inputs[name] = np.array([lengths[signature.axis_of_lengths(name)] for lengths in parts])
    padded_with_zeros = [
        spec
        for spec in signature.inputs
        if len(spec.axes) > 1 and (zeros or spec.name == ATTENTION_MASK)  # False hides
    ]
    padded = {spec.name: np.zeros_like(inputs[spec.name]) for spec in padded_with_zeros}
    for index, lengths in enumerate(parts):
        rows_of_sequence = cut(inputs, padded_with_zeros, index, lengths)
        for name, window in cut(padded, padded_with_zeros, index, lengths).items():
            window[...] = rows_of_sequence[name]
    inputs |= padded
    # Rows that may attend to nothing can be NaN: those of padding, or all if a mask means the opposite.
    together = outputs(module, signature, inputs, accepts_nan=True)
    for index, lengths in enumerate(parts):
        alone = outputs(module, signature, cut(inputs, signature.inputs, index, lengths), accepts_nan=True)
        sizes_of_sequence = all_sizes(lengths, signature.derived_axes)
        batched = cut(together, signature.outputs, index, sizes_of_sequence)
        if not all(tolerance.holds(alone[name], batched[name]) for name in batched):
            return False
    return True


def cut(arrays: Arrays, specs: Iterable[TensorSpec], index: int, lengths: Mapping[str, int]) -> Arrays:
    """Views (1, ...) of one sequence of a batch, without what comes after its lengths."""
    windows = {spec.name: tuple(slice(lengths.get(str(axis))) for axis in spec.axes) for spec in specs}
    return {name: arrays[name][index : index + 1][window] for name, window in windows.items()}
