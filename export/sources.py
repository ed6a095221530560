"""What `python -m export` exports: a preset, a checkpoint or an encoder. Does not import PyTorch."""

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


@dataclass(frozen=True, kw_only=True)
class EncoderSource:
    """The text encoder of a folder.

    Attributes:
        pooling: For folders that do not state it; empty for that of the family.
        dimensions: Numbers of elements that embeddings can be shortened to.
        truncates: Whether long texts are cut unless a request says otherwise.
    """

    path: Path
    pooling: str = ""
    dimensions: tuple[int, ...] = ()
    truncates: bool = False

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name


Source = PresetSource | CheckpointSource | EncoderSource
