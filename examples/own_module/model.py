"""The model of a project of its own, in a file with a usual name."""

from torch import Tensor, nn


class Reader(nn.Module):
    """Self-attention with a residual: (B, T, 32) to (B, T, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        """Attends within each sequence."""
        attended, _ = self.attention(x, x, x, need_weights=False)
        result: Tensor = self.norm(x + attended)
        return result
