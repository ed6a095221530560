"""Readers of attention weights in other projects' checkpoints, and the error of all readers.

loading   `load_checkpoint`, the only entry point
layouts   `LAYOUTS`: the names that other projects give to the weights; does not import PyTorch
files     files of named tensors
"""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint cannot be read or lacks the requested attention. The message says what to change."""


def listed(items: Sequence[str], *, separator: str = ", ", shown: int = 12) -> str:
    """The first few items as text, and the number of the others."""
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return separator.join([*items[:shown], *more])
