"""Checkpoints that are refused, each by what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attention_serving.model.checkpoints.errors import CheckpointError
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.checkpoints.loading import load_checkpoint

D, HEADS = 12, 3
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def linear(**layers: tuple[int, ...]) -> Tensors:
    """Weights of the shapes given, and a bias for each."""
    names = {name.replace("__", "."): shape for name, shape in layers.items()}
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in names.items()}
    return weights | {f"{name}.bias": torch.ones(shape[0]) for name, shape in names.items()}


def tensors_of(layout: str) -> Tensors:
    """Sound tensors: width 12, three heads."""
    square = (D, D)
    tensors: dict[str, Tensors] = {
        "torch": dict(nn.MultiheadAttention(D, HEADS).state_dict()),
        "bert": linear(self__query=square, self__key=square, self__value=square, output__dense=square),
        "gpt2": {
            "c_attn.weight": torch.ones(D, 3 * D),
            "c_attn.bias": torch.ones(3 * D),
            "c_proj.weight": torch.ones(D, D),
            "c_proj.bias": torch.ones(D),
        },
        "llama": linear(q_proj=square, k_proj=(4, D), v_proj=(4, D), o_proj=square),
        "clip": linear(q_proj=square, k_proj=square, v_proj=square, out_proj=square),
        "generic": linear(
            projections__query=square, projections__key=square, projections__value=square, output=square
        ),
    }
    return tensors[layout]


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def reshape(name: str, *shape: int) -> Change:
    return put(name, torch.ones(shape))


def both(*changes: Change) -> Change:
    return lambda tensors: [change(tensors) for change in changes]


def refusal_of(path: Path, *, layout: str = "bert", heads: int = HEADS, **options: Any) -> str:
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path, layout=layout, heads=heads, **options)
    return str(refusal.value)


@pytest.mark.parametrize("prefix", [pytest.param("", id="no-prefix"), pytest.param("a.0.", id="prefix")])
@pytest.mark.parametrize("layout", ["torch", "bert", "gpt2", "llama", "clip", "generic"])
def test_the_tensors_that_the_refused_ones_are_made_of_are_sound(
    tmp_path: Path, layout: str, prefix: str
) -> None:
    save_file(
        {prefix + name: tensor for name, tensor in tensors_of(layout).items()}, tmp_path / "w.safetensors"
    )
    load_checkpoint(tmp_path / "w.safetensors", layout=layout, prefix=prefix, heads=HEADS)


@pytest.mark.parametrize(
    ("layout", "change", "messages"),
    [
        pytest.param("bert", drop("self.key.weight"), ["a.0.self.key.weight: missing"], id="missing-weight"),
        pytest.param("bert", drop("self.key.bias"), ["a.0.self.key.bias: missing"], id="missing-bias"),
        pytest.param("llama", drop("k_proj.bias"), ["a.0.k_proj.bias: missing"], id="some-biases-only"),
        pytest.param(
            "generic", drop("output.weight"), ["a.0.output.weight: missing"], id="bias-without-weight"
        ),
        pytest.param("torch", drop("out_proj.weight"), ["a.0.out_proj.weight: missing"], id="torch-output"),
        pytest.param(
            "bert", reshape("self.gate.weight", 2), ["a.0.self.gate.weight: unexpected"], id="extra"
        ),
        pytest.param(
            "torch",
            both(reshape("bias_k", 1, 1, D), reshape("bias_v", 1, 1, D)),
            ["a.0.bias_k: appends a learnt key", "a.0.bias_v: appends", "not supported"],
            id="bias_k-and-bias_v",
        ),
        pytest.param(
            "llama",
            both(reshape("q_norm.weight", 4), reshape("k_norm.weight", 4)),
            ["a.0.q_norm.weight: normalises", "a.0.k_norm.weight: normalises"],
            id="query-and-key-norms",
        ),
        pytest.param(
            "bert",
            reshape("self.key.weight", D, 9),
            ["a.0.self.key.weight: expected shape (12, 12), found (12, 9)"],
            id="key-of-another-width",
        ),
        pytest.param(
            "bert",
            reshape("self.query.weight", 9, 10),
            ["a.0.self.query.weight: expected shape (12, 12), found (9, 10)"],
            id="query-of-another-width",
        ),
        pytest.param(
            "gpt2",
            reshape("c_attn.weight", 3 * D, D),
            ["a.0.c_attn.weight: expected shape (12, 36), found (36, 12)"],
            id="gpt2-as-linear",
        ),
        pytest.param(
            "torch",
            reshape("in_proj_weight", 3 * D + 1, D),
            ["a.0.in_proj_weight: expected shape (36, 12), found (37, 12)"],
            id="torch-not-in-thirds",
        ),
        pytest.param(
            "llama",
            reshape("v_proj.weight", 8, D),
            ["a.0.v_proj.weight: expected shape (4, 12), found (8, 12)"],
            id="fewer-key-than-value-heads",
        ),
        pytest.param(
            "llama",
            reshape("k_proj.weight", 6, D),
            ["a.0.k_proj.weight: expected shape (4, 12), found (6, 12)"],
            id="key-heads-and-a-half",
        ),
        pytest.param(
            "llama",
            both(reshape("k_proj.weight", 8, D), reshape("v_proj.weight", 8, D)),
            ["num_kv_heads=2: must divide num_heads=3"],
            id="key-heads-that-do-not-divide",
        ),
        pytest.param(
            "clip",
            reshape("k_proj.bias", D + 1),
            ["a.0.k_proj.bias: expected shape (12,), found (13,)"],
            id="misshapen-bias",
        ),
        pytest.param(
            "bert",
            reshape("self.query.weight", D),
            ["a.0.self.query.weight: expected a matrix, found shape (12,)"],
            id="weight-of-one-axis",
        ),
        pytest.param(
            "generic",
            reshape("projections.key.weight", 0, D),
            ["a.0.projections.key.weight: expected a matrix, found shape (0, 12)"],
            id="empty-weight",
        ),
        pytest.param(
            "bert",
            both(both(drop("self.key.bias"), reshape("more", 1)), reshape("output.dense.bias", 1)),
            [
                "a.0.self.key.bias: missing",
                "a.0.more: unexpected",
                "a.0.output.dense.bias: expected shape (12,), found (1,)",
            ],
            id="all-problems-at-once",
        ),
        pytest.param(
            "bert",
            put("self.key.weight", torch.ones(D, D, dtype=torch.int8)),
            ["a.0.self.key.weight: has elements of type int8, expected one of float16, bfloat16, float32"],
            id="integers",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_does_not_fit_is_reported_by_name(
    tmp_path: Path, suffix: str, layout: str, change: Change, messages: list[str]
) -> None:
    tensors = tensors_of(layout)
    change(tensors)
    path, named = tmp_path / f"w{suffix}", {f"a.0.{name}": tensor for name, tensor in tensors.items()}
    if suffix == ".pt":
        torch.save(named, path)
    else:
        save_file(named, path)
    refusal = refusal_of(path, layout=layout, prefix="a.0.")
    assert str(path) in refusal
    for message in messages:
        assert message in refusal


def test_many_problems_are_counted_rather_than_listed(tmp_path: Path) -> None:
    save_file(
        tensors_of("bert") | {f"x{i:03}": torch.ones(1) for i in range(200)}, tmp_path / "w.safetensors"
    )
    refusal = refusal_of(tmp_path / "w.safetensors")
    assert "x000: unexpected" in refusal
    assert "x199" not in refusal
    assert "and 188 more" in refusal


@pytest.mark.parametrize(
    "prefix", ["", "encoder.layer.0", "encoder.layer.7.attention.", "encoder.layer.0.attention"]
)
def test_a_wrong_prefix_is_refused_with_those_that_would_do(tmp_path: Path, prefix: str) -> None:
    tensors = {
        f"encoder.layer.{layer}.attention.{name}": tensor.clone()
        for layer in range(3)
        for name, tensor in tensors_of("bert").items()
    }
    save_file(tensors, tmp_path / "w.safetensors")
    refusal = refusal_of(tmp_path / "w.safetensors", prefix=prefix)
    assert f"prefix {prefix!r}" in refusal
    assert all(f"'encoder.layer.{layer}.attention.'" in refusal for layer in range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"layout": "brt"}, ", ".join(sorted(LAYOUTS)), id="unknown-layout"),
        pytest.param({"heads": 5}, "heads=5: must divide 12", id="heads-do-not-divide"),
        pytest.param({"heads": 0}, "heads=0: must be a positive integer", id="no-heads"),
        pytest.param({"heads": True}, "heads=True: must be a positive integer", id="heads-no-number"),
        pytest.param({"layout": "gpt2", "cross": True}, "is self-attention", id="cross-gpt2"),
        pytest.param({"layout": "llama", "cross": True}, "is self-attention", id="cross-llama"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_file(tensors_of("bert"), tmp_path / "w.safetensors")
    assert message in refusal_of(tmp_path / "w.safetensors", **options)


def test_a_rotary_base_frequency_below_zero_is_refused(tmp_path: Path) -> None:
    save_file(tensors_of("llama"), tmp_path / "w.safetensors")
    assert "rotary_theta=-1.0" in refusal_of(tmp_path / "w.safetensors", layout="llama", rotary_theta=-1.0)


def test_a_fused_projection_is_refused_for_cross_attention(tmp_path: Path) -> None:
    save_file(linear(projections__fused=(3 * D, D), output=(D, D)), tmp_path / "w.safetensors")
    refusal = refusal_of(tmp_path / "w.safetensors", layout="generic", cross=True)
    assert "must not be fused with cross" in refusal
