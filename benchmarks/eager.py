"""Eager PyTorch in process, and the weights of the measured models. Runs in a process of its own."""

from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from benchmarks.compute import ComputeResult, PaddedBatch, TimedCall, batches_by_method, fastest
from benchmarks.workload import AttentionKind, Lengths, Model


@lru_cache
def build(model: Model) -> MultiHeadAttention:
    """Returns the module in evaluation mode, with the same weights in every process."""
    config = AttentionConfig(
        d_query=model.width,
        num_heads=model.heads,
        cross=model.kind is AttentionKind.CROSS,
        causal=model.kind is AttentionKind.CAUSAL,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(config).eval()


def save_weights(model: Model, folder: Path) -> Path:
    """Writes the weights as a checkpoint of the exporter's layout `generic`, and returns the file."""
    path = folder / f"{model.name}.safetensors"
    save_file(build(model).state_dict(), path)
    return path


def measure(model: Model, lengths: Lengths, size: int, seconds: float) -> ComputeResult:
    """Measures eager PyTorch with `size` sequences available at a time."""
    prepared = {
        how: [TimedCall(_prepare(model, one), one.sequences, one.tokens) for one in batches]
        for how, batches in batches_by_method(model, lengths, size).items()
    }
    return fastest(prepared, seconds)


def _prepare(model: Model, batch: PaddedBatch) -> "partial[torch.Tensor]":
    inputs = [torch.from_numpy(array) for array in batch.inputs.values()]
    # Causal attention does not reach the padding, which follows the sequence.
    padded = batch.key_lengths is not None and model.kind is not AttentionKind.CAUSAL
    key_lengths = torch.from_numpy(batch.key_lengths) if padded else None
    return partial(_run, build(model), inputs, key_lengths)


@torch.inference_mode()
def _run(
    module: MultiHeadAttention, inputs: list[torch.Tensor], key_lengths: torch.Tensor | None
) -> torch.Tensor:
    context, _ = module(*inputs, key_lengths=key_lengths)
    return torch.as_tensor(context)
