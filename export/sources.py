"""What `python -m export` exports: a preset or a checkpoint. Does not import PyTorch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PresetSource:
    """A preset with random weights of a seed."""

    name: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """Weights of another project; the fields are the arguments of `load_checkpoint`."""

    path: Path
    layout: str
    prefix: str
    heads: int
    causal: bool
    cross: bool
    rotary_theta: float

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.name


Source = PresetSource | CheckpointSource
