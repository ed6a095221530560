"""Runs a module with masks in eager PyTorch before its export: what they hide changes no result."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from attention_serving.artifact.manifest import ATTENTION_MASK, BATCH_AXIS, KEY_LENGTHS, QUERY_LENGTHS
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import AdaptedModule, Mask, Meaning
from attention_serving.export.errors import ExportError
from attention_serving.export.probe import first_sizes, outputs, rng
from attention_serving.export.signature import Signature, random_inputs


def equal_without_masks(
    module: AdaptedModule, masks: Sequence[Mask], signature: Signature, tolerance: Tolerance
) -> bool:
    """Whether a module computes the same without masks that hide nothing."""
    inputs = random_inputs(signature, first_sizes(signature), rng())
    given, masked = module.masks, outputs(module, signature, inputs)
    try:
        module.masks = tuple(masks)
        without = outputs(module, signature, inputs)
    except ExportError:
        return False
    finally:
        module.masks = given
    return all(tolerance.holds(without[name], masked[name]) for name in masked)


def check_masks(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules whose results depend on rows that a mask of keys hides.

    Raises:
        ExportError: The result of a sequence depends on such rows.
    """
    for mask in module.masks:
        axis = mask.sequence_axes[-1]
        if len(mask.sequence_axes) == 1 and not can_be_padded(module, signature, tolerance, [axis]):
            raise _depends_on_hidden(mask)


def check_pairs(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses a mask of query and key rows that says the opposite of what is stated.

    Results may depend on a hidden row in another way, such as through a layer without the mask.

    Raises:
        ExportError: Results depend on a row that the mask hides, and would not with the opposite meaning.
    """
    given = module.masks
    mask = next(mask for mask in given if len(mask.sequence_axes) > 1)
    if mask.meaning is Meaning.ADDED or can_be_padded(module, signature, tolerance):
        return
    module.masks = tuple(replace(each, meaning=each.opposite) if each is mask else each for each in given)
    fits = can_be_padded(module, signature, tolerance)
    module.masks = given
    if fits:
        raise _depends_on_hidden(mask)


def _depends_on_hidden(mask: Mask) -> ExportError:
    return ExportError(
        f"{mask.name} {mask.axes}, {mask.meaning.value!r}: the result of a sequence depends on rows that "
        f"{mask.name} hides. If it means the opposite, state masks={{{mask.name!r}: "
        f"{mask.opposite.value!r}}}; otherwise mask these rows everywhere, or pass "
        f"masks={{{mask.name!r}: None}}, which makes it an ordinary input"
    )


def can_be_padded(
    module: nn.Module, signature: Signature, tolerance: Tolerance, axes: Sequence[str] | None = None
) -> bool:
    """Whether results do not depend on rows after the lengths of a sequence, on some axes or on all."""
    sizes = first_sizes(signature)
    inputs = random_inputs(signature, sizes, rng())
    padded = signature.sequence_axes if axes is None else axes
    # The first sequence is one row shorter than the others on these axes.
    lengths = {axis: sizes[axis] - (axis in padded) for axis in signature.sequence_axes}
    counted = {QUERY_LENGTHS: str(signature.inputs[0].axes[1]), KEY_LENGTHS: signature.key_axis}
    for name in counted.keys() & inputs.keys():
        inputs[name] = np.full(sizes[BATCH_AXIS], sizes[counted[name]])
        inputs[name][0] = lengths[counted[name]]
    own = {name: array[:1] for name, array in inputs.items()}
    for spec in signature.inputs:
        cut = tuple(slice(lengths.get(str(axis))) for axis in spec.axes)
        if spec.name == ATTENTION_MASK:
            hidden = np.zeros_like(inputs[spec.name][0])
            hidden[cut[1:]] = inputs[spec.name][0][cut[1:]]
            inputs[spec.name][0] = hidden
        own[spec.name] = own[spec.name][cut]
    together, alone = outputs(module, signature, inputs), outputs(module, signature, own)
    return all(
        tolerance.holds(
            alone[spec.name][0],
            together[spec.name][0][tuple(slice(lengths.get(str(axis))) for axis in spec.axes[1:])],
        )
        for spec in signature.outputs
    )
