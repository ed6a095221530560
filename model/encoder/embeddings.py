"""From token ids to the rows of the first layer.

Shapes: B batch, T tokens, d width.
"""

from torch import Tensor, nn

from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.norm import make_norm


class TokenEmbeddings(nn.Module):
    """The sum of an embedding for each token, its position and its type, normalised if configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width) if config.positions else None
        self.token_types = nn.Embedding(config.token_types, config.width) if config.token_types else None
        self.padding_id = config.padding_id
        self.norm = None
        if config.embedding_norm:
            self.norm = make_norm(
                config.norm, config.width, epsilon=config.norm_epsilon, bias=config.norm_bias
            )

    def forward(self, token_ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, d) rows."""
        rows: Tensor = self.tokens(token_ids)  # (B, T, d)
        if self.token_types is not None:
            rows = rows + self.token_types.weight[0]  # a single text has the first type only
        if self.positions is not None:
            rows = rows + self._positions(self.positions, token_ids)
        if self.norm is not None:
            rows = self.norm(rows)
        return rows

    def _positions(self, table: nn.Embedding, token_ids: Tensor) -> Tensor:
        """(T, d) if positions count from 0, otherwise (B, T, d)."""
        if self.padding_id is None:
            return table.weight[: token_ids.shape[1]]
        counted = (token_ids != self.padding_id).long()  # (B, T)
        positions: Tensor = table(counted.cumsum(dim=1) * counted + self.padding_id)
        return positions
