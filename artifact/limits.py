"""Bounds of artifacts that settings need too. Imports nothing, so that `--help` is fast."""

# The largest tolerance of a precision that export offers: the absolute one of int8.
MAX_TOLERANCE = 0.1
