"""Eager PyTorch in process. Runs in a process of its own."""

from functools import lru_cache, partial

import torch

from benchmarks.batches import Batch, pad, ways
from benchmarks.models import build
from benchmarks.timing import ComputeResult, Run, best
from benchmarks.workload import Array, Kind, Lengths, Model, sequences
from model.attention import MultiHeadAttention


def measure(model: Model, lengths: Lengths, size: int, seconds: float) -> ComputeResult:
    """The best rate of sequences of which `size` are there at a time."""
    prepared = {
        how: [Run(_prepare(model, batch), batch.sequences, batch.tokens) for batch in batches]
        for how, batches in ways(model, lengths, size).items()
    }
    return best(prepared, seconds)


def answer(model: Model, lengths: Lengths, count: int) -> list[Array]:
    """Context vectors of the first sequences, one by one, each (Tq, d)."""
    batches = [pad(model, [one]) for one in sequences(model, lengths)[:count]]
    return [_prepare(model, batch)()[0].numpy() for batch in batches]


def _prepare(model: Model, batch: Batch) -> "partial[torch.Tensor]":
    inputs = [torch.from_numpy(array) for array in batch.inputs.values()]
    # Causal rows see no padding, which follows them.
    padded = batch.key_lengths is not None and model.kind is not Kind.CAUSAL
    key_lengths = torch.from_numpy(batch.key_lengths) if padded else None
    return partial(_run, _module(model), inputs, key_lengths)


@torch.inference_mode()
def _run(
    module: MultiHeadAttention, inputs: list[torch.Tensor], key_lengths: torch.Tensor | None
) -> torch.Tensor:
    context, _ = module(*inputs, key_lengths=key_lengths)
    return torch.as_tensor(context)


@lru_cache
def _module(model: Model) -> MultiHeadAttention:
    return build(model)
