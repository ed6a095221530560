"""The largest number of rows that a module takes on each sequence axis."""

from collections.abc import Mapping, Sequence

from torch import nn

# Attributes by which configurations of other projects state it, such as those of Hugging Face models.
CONFIG_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
MaxLength = int | Mapping[str, int] | None


def find_max_lengths(module: nn.Module, axes: Sequence[str], given: MaxLength) -> dict[str, int]:
    """The largest length by sequence axis; axes without a limit are absent.

    Args:
        module: Its `config`, if it has one, is read for what the caller does not give.
        axes: The sequence axes of the inputs.
        given: One limit for all axes, or limits by axis name; None to take that of `module.config`.

    Raises:
        ValueError: A limit is not an integer of at least 2, or names an axis that does not exist.
    """
    if given is None:
        found = (getattr(getattr(module, "config", None), name, None) for name in CONFIG_FIELDS)
        length = next((value for value in found if isinstance(value, int) and value > 1), None)
        return {} if length is None else dict.fromkeys(axes, length)
    limits = dict(given) if isinstance(given, Mapping) else dict.fromkeys(axes, given)
    if unknown := sorted(set(limits) - set(axes)):
        raise ValueError(f"max_length names {', '.join(unknown)}; the sequence axes are {', '.join(axes)}")
    for axis, length in limits.items():
        if isinstance(length, bool) or not isinstance(length, int) or length < 2:  # noqa: PLR2004 - two sizes
            raise ValueError(f"max_length={length!r} of axis {axis!r}: must be an integer of at least 2")
    return limits
