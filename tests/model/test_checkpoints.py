"""Checkpoints of PyTorch's own modules and of this project's: the weights that are read."""

import tempfile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.checkpoints import files
from attention_serving.model.checkpoints.loading import load_checkpoint
from attention_serving.model.config import DERIVED, AttentionConfig
from tests.support.eager import ATOL, RTOL

D, HEADS = 12, 3
Module = TypeVar("Module", bound=nn.Module)
SUFFIXES = [".safetensors", ".pt", ".pth", ".bin"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def write(tensors: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


def random_weights(module: Module) -> Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


def generic(**options: Any) -> MultiHeadAttention:
    return random_weights(
        MultiHeadAttention(AttentionConfig(**({"d_query": D, "num_heads": HEADS} | options)))
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("bias", [pytest.param(True, id="biased"), pytest.param(False, id="unbiased")])
@torch.inference_mode()
def test_torch_self_attention(tmp_path: Path, suffix: str, *, bias: bool) -> None:
    torch_module = random_weights(nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True))
    path = write(torch_module.state_dict(), tmp_path / f"weights{suffix}")
    checkpoint = load_checkpoint(path, layout="torch", heads=HEADS)
    rows = torch.randn(2, 5, D)
    assert_close(checkpoint.module(rows)[0], torch_module(rows, rows, rows)[0])
    assert checkpoint.skipped == ()
    assert not checkpoint.module.config.cross


@pytest.mark.parametrize(
    ("d_key", "d_value", "cross"),
    [
        pytest.param(D, D, True, id="one-width"),
        pytest.param(8, 8, False, id="key-and-value-of-one-width"),
        pytest.param(8, 5, False, id="three-widths"),
        pytest.param(D, 5, False, id="value-of-its-own-width"),
        pytest.param(8, D, True, id="key-of-its-own-width"),
    ],
)
@pytest.mark.parametrize("bias", [pytest.param(True, id="biased"), pytest.param(False, id="unbiased")])
@torch.inference_mode()
def test_torch_cross_attention(tmp_path: Path, d_key: int, d_value: int, *, cross: bool, bias: bool) -> None:
    torch_module = nn.MultiheadAttention(D, HEADS, bias=bias, kdim=d_key, vdim=d_value, batch_first=True)
    path = write(random_weights(torch_module).state_dict(), tmp_path / "weights.safetensors")
    module = load_checkpoint(path, layout="torch", heads=HEADS, cross=cross).module
    query, key, value = torch.randn(2, 4, D), torch.randn(2, 6, d_key), torch.randn(2, 6, d_value)
    assert_close(module(query, key, value)[0], torch_module(query, key, value)[0])
    assert module.config.cross
    assert module.config.separate_value is (d_key != d_value)


@torch.inference_mode()
def test_attention_inside_an_encoder_layer(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, HEADS, 7, batch_first=True), 2, enable_nested_tensor=False
    )
    path = write(random_weights(encoder).state_dict(), tmp_path / "encoder.safetensors")
    module = load_checkpoint(path, layout="torch", prefix="layers.1.self_attn.", heads=HEADS).module
    rows, layer = torch.randn(2, 5, D), encoder.layers[1]
    assert isinstance(layer, nn.TransformerEncoderLayer)
    hidden = layer.norm1(rows + module(rows)[0])
    assert_close(layer.norm2(hidden + layer.linear2(layer.linear1(hidden).relu())), layer(rows))


@torch.inference_mode()
def test_both_attentions_inside_a_decoder_layer(tmp_path: Path) -> None:
    layer = random_weights(nn.TransformerDecoderLayer(D, HEADS, 7, batch_first=True))
    path = write(layer.state_dict(), tmp_path / "decoder.pt")
    own = load_checkpoint(path, layout="torch", prefix="self_attn.", heads=HEADS, causal=True).module
    cross = load_checkpoint(path, layout="torch", prefix="multihead_attn.", heads=HEADS, cross=True).module
    rows, memory = torch.randn(2, 5, D), torch.randn(2, 8, D)
    hidden = layer.norm1(rows + own(rows)[0])
    hidden = layer.norm2(hidden + cross(hidden, memory)[0])
    hidden = layer.norm3(hidden + layer.linear2(layer.linear1(hidden).relu()))
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert_close(hidden, layer(rows, memory, tgt_mask=future))


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Any configuration that names and shapes tell."""
    size = st.integers(1, 5)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    fused, cross, out_proj = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    d_query, d_key, d_value, d_k = (draw(size) for _ in range(4))
    cross = cross and not fused
    return AttentionConfig(
        d_query=d_query,
        num_heads=kv_heads * (1 if fused else group),
        num_kv_heads=kv_heads,
        projections="fused" if fused else "separate",
        cross=cross,
        separate_value=cross and d_value != d_key,
        d_key=d_key if cross else d_query,
        d_value=d_value if cross else d_query,
        d_k=d_k,
        d_v=d_k if fused else draw(size),
        qkv_bias=draw(st.booleans()),
        out_proj=out_proj,
        out_bias=out_proj and draw(st.booleans()),
        d_out=draw(size) if out_proj else DERIVED,
        causal=draw(st.booleans()),
    )


@settings(deadline=None)
@given(config=configs(), suffix=st.sampled_from(SUFFIXES), prefix=st.sampled_from(["", "a.", "a.b.0."]))
def test_generic_brings_back_any_configuration_and_its_weights(
    config: AttentionConfig, suffix: str, prefix: str
) -> None:
    module = random_weights(MultiHeadAttention(config))
    tensors = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = write(tensors, Path(folder) / f"weights{suffix}")
        loaded = load_checkpoint(
            path,
            layout="generic",
            prefix=prefix,
            heads=config.num_heads,
            causal=config.causal,
            cross=config.cross,
        ).module
    assert loaded.config == config
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_generic_takes_different_widths_for_cross_attention(tmp_path: Path) -> None:
    module = generic(cross=True, d_key=7)
    path = write(module.state_dict(), tmp_path / "weights.pt")
    assert load_checkpoint(path, layout="generic", heads=HEADS).module.config == module.config


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_floating_point_weights_become_float32(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in generic().state_dict().items()}
    loaded = load_checkpoint(write(tensors, tmp_path / f"w{suffix}"), layout="generic", heads=HEADS).module
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    torch.testing.assert_close(loaded.state_dict(), expected, rtol=0, atol=0)


def test_a_nan_among_the_weights_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = generic().state_dict()
    tensors["output.bias"][1] = float("nan")
    loaded = load_checkpoint(write(tensors, tmp_path / "w.pt"), layout="generic", heads=HEADS).module
    torch.testing.assert_close(loaded.state_dict(), tensors, rtol=0, atol=0, equal_nan=True)


def test_the_module_is_in_evaluation_mode_and_random_numbers_stay(tmp_path: Path) -> None:
    path = write(generic().state_dict(), tmp_path / "w.pt")
    before = torch.get_rng_state()
    loaded = load_checkpoint(path, layout="generic", heads=HEADS).module
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_module_does_not_change_with_the_file(tmp_path: Path) -> None:
    module = generic(projections="fused")
    path = write(module.state_dict(), tmp_path / "w.pt")
    loaded = load_checkpoint(path, layout="generic", heads=HEADS).module
    path.write_bytes(bytes(path.stat().st_size))
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_a_nested_state_dict_is_read_under_the_path_to_it(tmp_path: Path) -> None:
    module = generic()
    torch.save({"epoch": 3, "state_dict": module.state_dict(), "optimizer": {"state": {}}}, tmp_path / "w.pt")
    loaded = load_checkpoint(tmp_path / "w.pt", layout="generic", prefix="state_dict.", heads=HEADS).module
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)


def gpt2_tensors() -> dict[str, Tensor]:
    rng = np.random.default_rng(5)
    shapes = {
        "c_attn.weight": (D, 3 * D),
        "c_attn.bias": (3 * D,),
        "c_proj.weight": (D, D),
        "c_proj.bias": (D,),
    }
    tensors = {name: torch.from_numpy(rng.standard_normal(shape)).float() for name, shape in shapes.items()}
    return tensors | {"bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "masked_bias": torch.tensor(-1e4)}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_stands_beside_attention_is_left_out_and_said(tmp_path: Path, suffix: str) -> None:
    tensors = {f"h.0.attn.{name}": tensor for name, tensor in gpt2_tensors().items()}
    tensors["h.0.ln_1.weight"] = torch.ones(D)
    path = write(tensors, tmp_path / f"w{suffix}")
    checkpoint = load_checkpoint(path, layout="gpt2", prefix="h.0.attn.", heads=HEADS)
    assert checkpoint.skipped == ("h.0.attn.bias", "h.0.attn.masked_bias")
    assert checkpoint.module.config == AttentionConfig(
        d_query=D, num_heads=HEADS, projections="fused", qkv_bias=True, causal=True
    )


def test_only_the_tensors_of_attention_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"h.{layer}.{name}": tensor for layer in (0, 1) for name, tensor in gpt2_tensors().items()}
    path = write(tensors, tmp_path / "w.safetensors")
    read, read_one = [], files.SafetensorsFile.read

    def watched(file: files.SafetensorsFile, name: str) -> Tensor:
        read.append(name)
        return read_one(file, name)

    monkeypatch.setattr(files.SafetensorsFile, "read", watched)
    load_checkpoint(path, layout="gpt2", prefix="h.1.", heads=HEADS)
    assert sorted(read) == [
        f"h.1.c_{layer}.{kind}" for layer in ("attn", "proj") for kind in ("bias", "weight")
    ]
