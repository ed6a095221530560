"""Checkpoints that the transformers library wrote, against the attention that it computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from attention_serving.model.checkpoints.loading import Checkpoint, load_checkpoint
from tests.support.eager import ATOL, RTOL

D, HEADS, LENGTH = 16, 4, 7
SIZES: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "hidden_size": D,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
}
TOKENS: dict[str, Any] = {"vocab_size": 10, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
THETA = 1000.0
Model = Any  # the library's types say little of a model's parts
Save = Callable[[Model, Path], Path]


def random_weights(model: Model) -> Model:
    """Weights and biases of a size at which all of them count."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.set_attn_implementation("eager")
    return model.eval()


def save_published(model: Model, folder: Path) -> Path:
    """What is uploaded: names of the published checkpoints, whatever they are in memory."""
    model.save_pretrained(folder)
    return folder / "model.safetensors"


def save_state_dict(model: Model, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


SAVES = [
    pytest.param(save_published, id="safetensors"),
    pytest.param(save_state_dict, id="state_dict"),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def rows() -> Tensor:
    return torch.randn(2, LENGTH, D)


def causal_mask() -> Tensor:
    """(1, 1, T, T), added to the scores."""
    return torch.full((1, 1, LENGTH, LENGTH), float("-inf")).triu(1)


def assert_context(checkpoint: Checkpoint, inputs: Tensor, expected: Tensor, **options: Tensor) -> None:
    with torch.inference_mode():
        context, _ = checkpoint.module(inputs, **options)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(context, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("save", SAVES)
def test_bert(tmp_path: Path, save: Save) -> None:
    model = random_weights(transformers.BertModel(transformers.BertConfig(**SIZES, **TOKENS)))
    prefix = "encoder.layer.1.attention."
    checkpoint = load_checkpoint(save(model, tmp_path), layout="bert", prefix=prefix, heads=HEADS)
    attention, inputs = model.encoder.layer[1].attention, rows()
    with torch.inference_mode():
        expected = attention.output.dense(attention.self(inputs)[0])
    assert_context(checkpoint, inputs, expected)
    assert checkpoint.skipped == (f"{prefix}output.LayerNorm.bias", f"{prefix}output.LayerNorm.weight")


@pytest.mark.parametrize("save", SAVES)
def test_gpt2(tmp_path: Path, save: Save) -> None:
    config = transformers.GPT2Config(n_embd=D, n_head=HEADS, n_layer=2, n_positions=8, **TOKENS)
    model = random_weights(transformers.GPT2Model(config))
    checkpoint = load_checkpoint(save(model, tmp_path), layout="gpt2", prefix="h.1.attn.", heads=HEADS)
    inputs = rows()
    with torch.inference_mode():
        expected = model.h[1].attn(inputs, attention_mask=causal_mask())[0]
    assert_context(checkpoint, inputs, expected)
    assert checkpoint.module.config.projections == "fused"
    assert checkpoint.skipped == ()


def llama(kv_heads: int, **options: Any) -> Model:
    config = transformers.LlamaConfig(
        num_key_value_heads=kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **SIZES,
        **TOKENS,
        **options,
    )
    return random_weights(transformers.LlamaModel(config))


def qwen2(kv_heads: int) -> Model:
    config = transformers.Qwen2Config(
        num_key_value_heads=kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **SIZES,
        **TOKENS,
    )
    return random_weights(transformers.Qwen2Model(config))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("build", "kv_heads"),
    [
        pytest.param(lambda: llama(HEADS), HEADS, id="llama-as-many-key-heads"),
        pytest.param(lambda: llama(2), 2, id="llama-grouped"),
        pytest.param(lambda: llama(1, head_dim=6), 1, id="llama-one-key-head-of-another-width"),
        pytest.param(lambda: llama(2, attention_bias=True), 2, id="llama-biased"),
        pytest.param(lambda: qwen2(2), 2, id="qwen2"),
    ],
)
def test_llama(tmp_path: Path, save: Save, build: Callable[[], Model], kv_heads: int) -> None:
    model, inputs = build(), rows()
    checkpoint = load_checkpoint(
        save(model, tmp_path),
        layout="llama",
        prefix="layers.1.self_attn.",
        heads=HEADS,
        rotary_theta=THETA,
    )
    positions = torch.stack([torch.arange(LENGTH) + 100, torch.arange(LENGTH) * 3])
    with torch.inference_mode():
        angles = LlamaRotaryEmbedding(model.config)(inputs, positions)
        expected = model.layers[1].self_attn(inputs, angles, causal_mask())[0]
    assert_context(checkpoint, inputs, expected, positions=positions)
    assert checkpoint.module.config.num_kv_heads == kv_heads


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("qkv_bias", [pytest.param(True, id="biased"), pytest.param(False, id="unbiased")])
def test_vit(tmp_path: Path, save: Save, *, qkv_bias: bool) -> None:
    config = transformers.ViTConfig(image_size=8, patch_size=4, qkv_bias=qkv_bias, **SIZES)
    model, inputs = random_weights(transformers.ViTModel(config)), rows()
    prefix = "encoder.layer.1.attention." if save is save_published else "layers.1.attention."
    checkpoint = load_checkpoint(save(model, tmp_path), layout="vit", prefix=prefix, heads=HEADS)
    with torch.inference_mode():
        expected = model.layers[1].attention(inputs)[0]
    assert_context(checkpoint, inputs, expected)
    assert checkpoint.module.config.qkv_bias is qkv_bias


@pytest.mark.parametrize("save", SAVES)
def test_clip(tmp_path: Path, save: Save) -> None:
    config = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **SIZES)
    model, inputs = random_weights(transformers.CLIPVisionModel(config)), rows()
    prefix = next(name for name in model.state_dict() if name.endswith("layers.1.self_attn.q_proj.weight"))
    prefix = prefix.removesuffix("q_proj.weight")
    checkpoint = load_checkpoint(save(model, tmp_path), layout="clip", prefix=prefix, heads=HEADS)
    with torch.inference_mode():
        expected = model.get_submodule(prefix.removesuffix("."))(inputs)[0]
    assert_context(checkpoint, inputs, expected)


@pytest.mark.parametrize("save", SAVES)
def test_the_query_and_key_norms_of_qwen3_are_refused_by_name(tmp_path: Path, save: Save) -> None:
    config = transformers.Qwen3Config(num_key_value_heads=2, head_dim=4, **SIZES, **TOKENS)
    path = save(random_weights(transformers.Qwen3Model(config)), tmp_path)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight: normalises") as refusal:
        load_checkpoint(path, layout="llama", prefix="layers.1.self_attn.", heads=HEADS)
    assert "layers.1.self_attn.q_norm.weight: normalises" in str(refusal.value)
