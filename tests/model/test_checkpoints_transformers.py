"""Checkpoints that the transformers library wrote, against the attention that it computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from attention_serving.model.checkpoints.loading import load_checkpoint
from tests.support.eager import ATOL, RTOL

pytestmark = pytest.mark.thorough
D, HEADS, LENGTH, THETA = 16, 4, 7, 1000.0
SIZES: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "hidden_size": D,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
}
TOKENS: dict[str, Any] = {"vocab_size": 10, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
POSITIONS = torch.stack([torch.arange(LENGTH) + 100, torch.arange(LENGTH) * 3])
FUTURE = torch.full((1, 1, LENGTH, LENGTH), float("-inf")).triu(1)  # added to the scores
Model = Any  # the library's types say little of a model's parts


def bert() -> Model:
    return transformers.BertModel(transformers.BertConfig(**SIZES, **TOKENS))


def gpt2() -> Model:
    config = transformers.GPT2Config(n_embd=D, n_head=HEADS, n_layer=2, n_positions=8, **TOKENS)
    return transformers.GPT2Model(config)


def llama(kv_heads: int, **options: Any) -> Model:
    sizes = SIZES | TOKENS | ROPE | {"num_key_value_heads": kv_heads} | options
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes))


def qwen2() -> Model:
    return transformers.Qwen2Model(transformers.Qwen2Config(**SIZES, **TOKENS, **ROPE, num_key_value_heads=2))


def vit() -> Model:
    config = transformers.ViTConfig(image_size=8, patch_size=4, qkv_bias=False, **SIZES)
    return transformers.ViTModel(config)


def clip() -> Model:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=8, patch_size=4, **SIZES))


def llama_attention(model: Model, rows: Tensor) -> Tensor:
    found: Tensor = model.layers[1].self_attn(rows, model.rotary_emb(rows, POSITIONS), FUTURE)[0]
    return found


def bert_attention(model: Model, rows: Tensor) -> Tensor:
    attention = model.encoder.layer[1].attention
    found: Tensor = attention.output.dense(attention.self(rows)[0])
    return found


Attention = Callable[[Model, Tensor], Tensor]
# The layout, the model, what stands before the names of its second layer's attention, and that attention.
CASES: dict[str, tuple[str, Callable[[], Model], str, Attention]] = {
    "bert": ("bert", bert, "encoder.layer.1.attention.", bert_attention),
    "gpt2": ("gpt2", gpt2, "h.1.attn.", lambda model, rows: model.h[1].attn(rows, attention_mask=FUTURE)[0]),
    "llama, grouped": ("llama", lambda: llama(2), "layers.1.self_attn.", llama_attention),
    "llama, one key head": ("llama", lambda: llama(1, head_dim=6), "layers.1.self_attn.", llama_attention),
    "llama, biased": ("llama", lambda: llama(2, attention_bias=True), "layers.1.self_attn.", llama_attention),
    "qwen2": ("llama", qwen2, "layers.1.self_attn.", llama_attention),
    "vit": ("vit", vit, "layers.1.attention.", lambda model, rows: model.layers[1].attention(rows)[0]),
    "clip": (
        "clip",
        clip,
        "layers.1.self_attn.",
        lambda model, rows: next(
            part for name, part in model.named_modules() if name.endswith("layers.1.self_attn")
        )(rows)[0],
    ),
}


def random_weights(model: Model) -> Model:
    """Weights and biases of a size at which all of them count."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("published", [True, False], ids=["published", "in memory"])
@pytest.mark.parametrize(("layout", "make", "prefix", "attention"), CASES.values(), ids=CASES)
def test_equals_the_library(
    tmp_path: Path, layout: str, make: Callable[[], Model], prefix: str, attention: Attention, published: bool
) -> None:
    model, rows = random_weights(make()), torch.randn(2, LENGTH, D)
    if layout == "vit" and published:
        prefix = "encoder.layer.1.attention."
    if layout == "clip":
        name = next(name for name in model.state_dict() if name.endswith(f"{prefix}q_proj.weight"))
        prefix = name.removesuffix("q_proj.weight")
    model.save_pretrained(tmp_path)  # with the names of published checkpoints
    torch.save(model.state_dict(), tmp_path / "model.pt")  # with those in memory
    path = tmp_path / ("model.safetensors" if published else "model.pt")
    checkpoint = load_checkpoint(path, layout=layout, prefix=prefix, heads=HEADS, rotary_theta=THETA)
    options = {"positions": POSITIONS} if checkpoint.module.config.rotary_theta else {}
    with torch.inference_mode():
        expected = attention(model, rows)
        context, _ = checkpoint.module(rows, **options)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(context, expected, rtol=RTOL, atol=ATOL)
