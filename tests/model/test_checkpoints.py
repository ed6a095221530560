"""Checkpoints of PyTorch's own modules and of this project's: the weights that are read."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.checkpoints import files
from attention_serving.model.checkpoints.loading import load_checkpoint
from attention_serving.model.config import DERIVED, AttentionConfig
from tests.model.checkpoints import HEADS, D, tensors_of, write
from tests.model.reference import configs
from tests.support.eager import ATOL, RTOL

Module = TypeVar("Module", bound=nn.Module)
WIDTHS = {"one width": (D, D, True), "three widths": (8, 5, False)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def random_weights(module: Module) -> Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


assert_close = partial(torch.testing.assert_close, rtol=RTOL, atol=ATOL)
assert_same_weights = partial(torch.testing.assert_close, rtol=0, atol=0)


def generic(**options: Any) -> MultiHeadAttention:
    config = AttentionConfig(**({"d_query": D, "num_heads": HEADS} | options))
    return random_weights(MultiHeadAttention(config))


@pytest.mark.parametrize("bias", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize(("d_key", "d_value", "cross"), WIDTHS.values(), ids=WIDTHS)
@torch.inference_mode()
def test_torch_attention(tmp_path: Path, d_key: int, d_value: int, cross: bool, bias: bool) -> None:
    torch_module = nn.MultiheadAttention(D, HEADS, bias=bias, kdim=d_key, vdim=d_value, batch_first=True)
    path = write(random_weights(torch_module).state_dict(), tmp_path / "weights.safetensors")
    module = load_checkpoint(path, layout="torch", heads=HEADS, cross=cross).module
    query, key, value = torch.randn(2, 4, D), torch.randn(2, 6, d_key), torch.randn(2, 6, d_value)
    assert_close(module(query, key, value)[0], torch_module(query, key, value)[0])
    assert module.config.cross
    assert module.config.separate_value is (d_key != d_value)
    if d_key == d_value == D:
        checkpoint = load_checkpoint(path, layout="torch", heads=HEADS)
        assert_close(checkpoint.module(query)[0], torch_module(query, query, query)[0])
        assert (checkpoint.skipped, checkpoint.module.config.cross) == ((), False)


def told(config: AttentionConfig) -> AttentionConfig:
    """A configuration without what names and shapes do not tell."""
    is_fused = config.projections == "fused" and config.num_kv_heads == config.num_heads
    return replace(
        config,
        projections="fused" if is_fused and config.d_v == config.d_k else "separate",
        separate_value=config.d_value != config.d_key,
        out_bias=config.out_proj and config.out_bias,
        alibi=False,
        window=0,
        rotary_theta=0.0,
        rotary_interleaved=False,
        qk_norm=0.0,
        scale=DERIVED,
    )


@given(
    config=configs().map(told), suffix=st.sampled_from(files.SUFFIXES), prefix=st.sampled_from(["", "a.b.0."])
)
def test_generic_brings_back_any_configuration_and_its_weights(
    config: AttentionConfig, suffix: str, prefix: str
) -> None:
    module = random_weights(MultiHeadAttention(config))
    tensors = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    options: dict[str, Any] = {"heads": config.num_heads, "causal": config.causal, "cross": config.cross}
    before = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder:
        path = write(tensors, Path(folder) / f"weights{suffix}")
        loaded = load_checkpoint(path, layout="generic", prefix=prefix, **options).module
    assert loaded.config == config
    assert_same_weights(loaded.state_dict(), module.state_dict())
    assert not any(part.training for part in loaded.modules())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_floating_point_weights_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in generic().state_dict().items()}
    path = write(tensors, tmp_path / "w.safetensors")
    loaded = load_checkpoint(path, layout="generic", heads=HEADS).module
    assert_same_weights(loaded.state_dict(), {name: tensor.float() for name, tensor in tensors.items()})


def test_a_nested_state_dict_is_read_under_the_path_to_it(tmp_path: Path) -> None:
    module = generic()
    torch.save({"epoch": 3, "state_dict": module.state_dict(), "optimizer": {"state": {}}}, tmp_path / "w.pt")
    loaded = load_checkpoint(tmp_path / "w.pt", layout="generic", prefix="state_dict.", heads=HEADS).module
    assert_same_weights(loaded.state_dict(), module.state_dict())


def test_tensors_beside_attention_are_skipped_and_listed(tmp_path: Path) -> None:
    tensors = {f"h.{layer}.{name}": tensor for layer in (0, 1) for name, tensor in tensors_of("gpt2").items()}
    tensors |= {"h.1.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "h.1.masked_bias": torch.tensor(-1e4)}
    path = write(tensors, tmp_path / "w.safetensors")
    checkpoint = load_checkpoint(path, layout="gpt2", prefix="h.1.", heads=HEADS)
    assert checkpoint.skipped == ("h.1.bias", "h.1.masked_bias")
    assert checkpoint.module.config == AttentionConfig(
        d_query=D, num_heads=HEADS, projections="fused", qkv_bias=True, causal=True
    )
