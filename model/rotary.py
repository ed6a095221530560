"""Rotary position embedding (Su et al., "RoFormer", 2021, section 3.2.2).

Pairs of elements of a query or key are turned by an angle that grows with the row's position, so that
their product depends on the distance between two rows.
"""

import torch
from torch import Tensor


def rotate(heads: Tensor, positions: Tensor, *, theta: float, interleaved: bool) -> Tensor:
    """Turns each pair i of a row at position p by the angle p * theta ** (-2 i / d).

    Args:
        heads: (B, H, T, d), d even.
        positions: (B, T) integers.
        theta: Base frequency.
        interleaved: Whether a pair is (2 i, 2 i + 1), rather than (i, i + d / 2).

    Returns:
        (B, H, T, d).
    """
    width = heads.shape[-1]
    exponents = torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width
    angles = positions[:, None, :, None] * theta**-exponents  # (B, 1, T, d / 2)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    if interleaved:
        first, second = heads.reshape(*heads.shape[:-1], width // 2, 2).unbind(dim=-1)
    else:
        first, second = heads.chunk(2, dim=-1)  # (B, H, T, d / 2) each
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
