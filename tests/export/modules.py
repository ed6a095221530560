"""Tiny modules to export, valid and invalid, and their graphs."""

from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from torch import Tensor

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.artifact import GRAPH_FILES
from attention_serving.export.graph import trace
from attention_serving.export.signature import AttentionModule, Signature, signatures
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig

SELF = AttentionConfig(d_query=4, num_heads=2, d_k=3, d_v=5)


class Shortened(MultiHeadAttention):
    """Returns fewer rows than its signature states."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        context, weights = super().forward(query, *others, **options)
        return context[:, :2], weights


class Specialised(MultiHeadAttention):
    """Takes only the query length of the exporter's example."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(query + torch.zeros(3, 1), *others, **options)


class Foreign(MultiHeadAttention):
    """Uses an operator outside the ONNX standard."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        twice = torch.onnx.ops.symbolic(
            "com.example::Twice", (query,), {}, dtype=query.dtype, shape=query.shape, version=1
        )
        return super().forward(twice, *others, **options)


def attention(
    config: AttentionConfig = SELF, seed: int = 0, kind: type[MultiHeadAttention] = MultiHeadAttention
) -> MultiHeadAttention:
    """A module with random weights of a seed."""
    torch.manual_seed(seed)
    return kind(config).eval()


def signature(module: AttentionModule, kind: GraphKind) -> Signature:
    """The signature of one graph."""
    return next(signed for signed in signatures(module) if signed.kind is kind)


@cache
def traced(config: AttentionConfig, kind: GraphKind) -> onnx_ir.Model:
    """A graph as traced, made once. Tests do not modify it."""
    module = attention(config)
    return trace(module, signature(module, kind)).model


def exported(artifacts: Path, name: str, kind: GraphKind) -> onnx.ModelProto:
    """A graph of the artifacts that all tests share."""
    return onnx.load(artifacts / name / "1" / GRAPH_FILES[kind])
