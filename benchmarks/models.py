"""Builds and exports the measured models. Runs in a process of its own: nothing else here needs PyTorch."""

from pathlib import Path

import torch

from artifact.manifest import is_whole
from benchmarks.repository import VERSION, artifact
from benchmarks.workload import Kind, Model
from export.artifact import write_artifact
from export.model_id import ModelId
from model.attention import MultiHeadAttention
from model.config import AttentionConfig


def build(model: Model) -> MultiHeadAttention:
    """The module in evaluation mode; always with the same weights."""
    config = AttentionConfig(
        d_query=model.width,
        num_heads=model.heads,
        cross=model.kind is Kind.CROSS,
        causal=model.kind is Kind.CAUSAL,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(config).eval()


def export(model: Model, repository: Path) -> Path:
    """Writes the artifact unless it is there, and returns its folder."""
    folder = artifact(repository, model)
    if not is_whole(folder):
        description = f"{model.kind} attention, {model.heads} heads over width {model.width}"
        model_id = ModelId(model.name, VERSION)
        write_artifact(build(model), model_id, repository, description=description, replace=True)
    return folder
