"""Tiny modules to export, valid and invalid, and their graphs."""

from functools import cache
from typing import Any

import onnx
import torch
from torch import Tensor

from artifact.manifest import GraphKind
from export.graph import export_graph
from export.signature import AttentionModule, Signature, signatures
from model.attention import MultiHeadAttention
from model.config import AttentionConfig
from model.text import TextAttention, sentence_tokenizer

SELF = AttentionConfig(d_query=4, num_heads=2, d_k=3, d_v=5)
CROSS = AttentionConfig(
    d_query=4, d_key=5, d_value=6, num_heads=2, d_k=3, d_v=7, d_out=8, cross=True, separate_value=True
)


class Disagreeing(MultiHeadAttention):
    """Computes something else in its graph than in eager PyTorch."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        factor = 1.001 if torch.compiler.is_exporting() else 1.0
        return super().forward(query * factor, *others, **options)


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


def named_module(name: str) -> AttentionModule:
    """One of the valid modules: self, cross or text."""
    if name == "text":
        torch.manual_seed(0)
        return TextAttention(sentence_tokenizer("a b c d e"), AttentionConfig(d_query=4, causal=True)).eval()
    return attention({"self": SELF, "cross": CROSS}[name])


def signature(module: AttentionModule, kind: GraphKind) -> Signature:
    """The signature of one graph."""
    return next(signed for signed in signatures(module) if signed.kind is kind)


@cache
def graph(name: str, kind: GraphKind) -> onnx.ModelProto:
    """The graph of a valid module, exported once. Tests do not modify it."""
    module = named_module(name)
    return export_graph(module, signature(module, kind))
