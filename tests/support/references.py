"""PyTorch's own attention, and models that the tests export to be compared with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.support.tables import linear_layers


@dataclass(frozen=True)
class Reference:
    """A configuration, and what PyTorch answers to it."""

    config: AttentionConfig

    def module(self) -> MultiHeadAttention:
        """Our module, with weights that depend on the configuration only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.d_query)
            return MultiHeadAttention(self.config).eval()

    def attend(self, inputs: Sequence[Tensor], allowed: Tensor) -> Tensor:
        """Context vectors (Tq, d_out) of one sequence; NaN in rows that may attend to no key.

        Args:
            inputs: Query (Tq, d), and key (Tk, d) and value (Tk, d_value) if the model takes them.
            allowed: (H, Tq, Tk), True if the row may attend to the key, the causal rule included.
        """
        raise NotImplementedError


class MultiheadReference(Reference):
    """`torch.nn.MultiheadAttention` with the same weights."""

    def attend(self, inputs: Sequence[Tensor], allowed: Tensor) -> Tensor:
        query, key = inputs[0][None], inputs[-1][None]
        with torch.inference_mode():
            context, _ = self._torch_module()(query, key, key, attn_mask=~allowed, need_weights=False)
        answer: Tensor = context[0]
        return answer

    def _torch_module(self) -> nn.MultiheadAttention:
        module, config = self.module(), self.config
        layers, output = linear_layers(module), module.output
        assert output is not None
        other = nn.MultiheadAttention(
            config.d_query, config.num_heads, bias=config.qkv_bias, batch_first=True
        ).eval()
        with torch.no_grad():
            other.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
            other.out_proj.weight.copy_(output.weight)
            if other.in_proj_bias is not None:
                other.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
                other.out_proj.bias.copy_(output.bias)
        return other


class ScaledDotProductReference(Reference):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    def attend(self, inputs: Sequence[Tensor], allowed: Tensor) -> Tensor:
        heads = self.config.num_heads
        query, key, value = (rows.view(len(rows), heads, -1).transpose(0, 1) for rows in inputs)  # (H, T, d)
        context = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=self.config.scale)
        return context.transpose(0, 1).flatten(1)


def _multihead(heads: int, width: int, *, bias: bool, causal: bool, cross: bool) -> Reference:
    return MultiheadReference(
        AttentionConfig(
            d_query=heads * width, num_heads=heads, qkv_bias=bias, out_bias=bias, causal=causal, cross=cross
        )
    )


def _scaled_dot_product(heads: int, d_k: int, d_v: int, *, scale: float, causal: bool) -> Reference:
    return ScaledDotProductReference(
        AttentionConfig(
            d_query=heads * d_k,
            d_value=heads * d_v,
            num_heads=heads,
            cross=True,
            separate_value=True,
            projections="none",
            out_proj=False,
            causal=causal,
            scale=scale,
        )
    )


# Every value of each parameter occurs, and every pair of values of bias, causal and cross, and of scale and
# causal. Widths 1 and 3 and an odd number of heads are what kernels for even sizes could get wrong.
REFERENCES: dict[str, Reference] = {
    "torch-multihead-1x3": _multihead(1, 3, bias=True, causal=True, cross=False),
    "torch-multihead-2x16": _multihead(2, 16, bias=False, causal=True, cross=True),
    "torch-multihead-3x1": _multihead(3, 1, bias=True, causal=False, cross=True),
    "torch-multihead-3x2": _multihead(3, 2, bias=False, causal=False, cross=False),
    "torch-multihead-4x8": _multihead(4, 8, bias=True, causal=True, cross=True),
    "torch-sdpa-1x8x1": _scaled_dot_product(1, 8, 1, scale=0.125, causal=True),
    "torch-sdpa-2x1x3": _scaled_dot_product(2, 1, 3, scale=0.5, causal=False),
    "torch-sdpa-3x16x2": _scaled_dot_product(3, 16, 2, scale=1.0, causal=True),
    "torch-sdpa-4x3x8": _scaled_dot_product(4, 3, 8, scale=0.125, causal=False),
    "torch-sdpa-4x2x16": _scaled_dot_product(4, 2, 16, scale=0.5, causal=True),
    "torch-sdpa-2x3x3": _scaled_dot_product(2, 3, 3, scale=1.0, causal=False),
}
