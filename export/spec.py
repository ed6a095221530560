"""What is exported: a module, the signatures of its graphs, and what the manifest states about it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from attention_serving.artifact.encoder import EncoderFacts
from attention_serving.artifact.manifest import Cost
from attention_serving.export.signature import AttentionModule, Signature, signatures
from attention_serving.model.text import TextAttention

UNKNOWN_COST = Cost(flops_per_query=0, flops_per_key=0, flops_per_pair=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExportSpec:
    """A module in evaluation mode and float32, ready to export.

    Attributes:
        module: Its weights are counted and exported.
        signatures: One for each graph.
        max_lengths: By symbolic axis, the largest number of rows that the module takes.
        config: The attention configuration; empty for non-attention modules.
        num_heads: 0 if unknown, as for non-attention modules.
        cost: Floating-point operations; all 0 if unknown.
        tokenizer: For modules that take text.
        encoder: For text encoders.
    """

    module: nn.Module
    signatures: tuple[Signature, ...]
    max_lengths: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int = 0
    causal: bool = False
    cost: Cost = UNKNOWN_COST
    tokenizer: Tokenizer | None = None
    encoder: EncoderFacts | None = None


def attention_spec(module: AttentionModule) -> ExportSpec:
    """The export of an attention module, with all graphs."""
    config = module.config
    return ExportSpec(
        module=module.eval(),
        signatures=signatures(module),
        config=asdict(config),
        num_heads=config.num_heads,
        causal=config.causal,
        cost=Cost(
            flops_per_query=config.flops_per_query,
            flops_per_key=config.flops_per_key,
            flops_per_pair=config.flops_per_pair,
        ),
        tokenizer=module.tokenizer if isinstance(module, TextAttention) else None,
    )


def source_digest(module: nn.Module, options: Mapping[str, object]) -> str:
    """SHA-256 of a module's class, its weights and the options of its export.

    It is cheap beside an export, and tells two sources apart before either is exported. Equal digests do not
    prove equal artifacts, because the code of a module is not part of the digest.
    """
    digest = hashlib.sha256(type(module).__qualname__.encode())
    digest.update(json.dumps(dict(options), sort_keys=True, default=str).encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} ".encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
