"""Sound checkpoints of each layout: width 12, three heads."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

D, HEADS = 12, 3
Tensors = dict[str, Tensor]
SQUARE = (D, D)
SHAPES = {
    "bert": {"self.query": SQUARE, "self.key": SQUARE, "self.value": SQUARE, "output.dense": SQUARE},
    "llama": {"q_proj": SQUARE, "k_proj": (4, D), "v_proj": (4, D), "o_proj": SQUARE},
    "clip": {"q_proj": SQUARE, "k_proj": SQUARE, "v_proj": SQUARE, "out_proj": SQUARE},
    "generic": {**{f"projections.{name}": SQUARE for name in ("query", "key", "value")}, "output": SQUARE},
    "fused": {"projections.fused": (3 * D, D), "output": SQUARE},
}


def tensors_of(layout: str) -> Tensors:
    """The tensors of one attention module, by their names under the prefix."""
    if layout == "torch":
        return dict(nn.MultiheadAttention(D, HEADS).state_dict())
    if layout == "gpt2":
        sizes = {"attn.weight": (D, 3 * D), "attn.bias": (3 * D,), "proj.weight": SQUARE, "proj.bias": (D,)}
        return {f"c_{name}": torch.ones(shape) for name, shape in sizes.items()}
    shapes = SHAPES[layout]
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    return weights | {f"{name}.bias": torch.ones(shape[0]) for name, shape in shapes.items()}


def write(tensors: Tensors, path: Path) -> Path:
    """A file of tensors in the format that its suffix names."""
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path
