"""Attention weights that people bring: readers of other projects' checkpoints."""

from model.checkpoints.errors import CheckpointError
from model.checkpoints.layouts import LAYOUTS
from model.checkpoints.loading import Checkpoint, load_checkpoint

__all__ = ["LAYOUTS", "Checkpoint", "CheckpointError", "load_checkpoint"]
