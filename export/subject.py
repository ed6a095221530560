"""What is exported: a module, its graphs, and what the manifest says of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from artifact.manifest import Cost
from export.signature import AttentionModule, Signature, signatures
from model.text import TextAttention

UNKNOWN_COST = Cost(flops_per_query=0, flops_per_key=0, flops_per_pair=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A module in evaluation mode and float32, ready to export."""

    module: nn.Module
    signatures: tuple[Signature, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int = 0
    causal: bool = False
    cost: Cost = UNKNOWN_COST
    tokenizer: Tokenizer | None = None


def attention_subject(module: AttentionModule) -> Subject:
    """An attention module with all its graphs."""
    config = module.config
    return Subject(
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
