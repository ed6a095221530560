"""The measured models: their names, and their modules in eager PyTorch."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from attention_serving.export.signature import AttentionModule
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from benchmarks.cuda.plan import CAUSAL_CROSS, PRECISIONS, Run

VERSION = 1


class Case(NamedTuple):
    """A module in one precision."""

    module: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the model in the repository."""
        return self.module if self.precision == "fp32" else f"{self.module}-{self.precision}"

    def folder(self, repository: Path) -> Path:
        """Folder of the artifact."""
        return repository / self.name / str(VERSION)


def cases(run: Run) -> Iterator[Case]:
    """All models of a run."""
    names = run.extent.models or (*PRESETS, CAUSAL_CROSS)
    return (Case(name, precision) for name in names for precision in PRECISIONS)


def build(name: str) -> AttentionModule:
    """The module in eager PyTorch, in evaluation mode and fp32, always with the same weights."""
    if name != CAUSAL_CROSS:
        return build_preset(name)
    config = AttentionConfig(d_query=64, num_heads=4, cross=True, causal=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(config).eval()
