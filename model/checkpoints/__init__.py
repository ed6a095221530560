"""Readers of attention weights in other projects' checkpoints, and the error of all readers.

loading   `load_checkpoint`, the only entry point
layouts   `LAYOUTS`: the names that other projects give to the weights; does not import PyTorch
files     files of named tensors
"""

from collections.abc import Sequence

ITEMS = 12  # in an error


class CheckpointError(ValueError):
    """A checkpoint cannot be read or lacks the requested attention. The message says what to change."""


def summarise(items: Sequence[str], *, separator: str = ", ") -> str:
    """The first few items as text, and the number of the others."""
    more = [f"and {len(items) - ITEMS} more"] if len(items) > ITEMS else []
    return separator.join([*items[:ITEMS], *more])
