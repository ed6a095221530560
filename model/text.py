"""Attention over the words of a text: a word vocabulary, an embedding table, then self-attention."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig


def sentence_tokenizer(sentence: str) -> Tokenizer:
    """A tokenizer whose vocabulary is the sorted words of one sentence, commas removed.

    Text with other words cannot be encoded, because there is no token for unknown words.
    """
    normalizer, splitter = Replace(",", ""), WhitespaceSplit()
    words = sorted({word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence))})
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    return tokenizer


class TextAttention(nn.Module):
    """Self-attention over the embeddings of token ids."""

    def __init__(self, tokenizer: Tokenizer, config: AttentionConfig) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.config = config
        self.embedding = nn.Embedding(tokenizer.get_vocab_size(), config.d_query)
        self.attention = MultiHeadAttention(config)

    def forward(self, token_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Looks up the embeddings and attends.

        Args:
            token_ids: (B, T) int64, from 0 to below the size of the vocabulary.
            **options: The masks and `return_weights` of `MultiHeadAttention.forward`.

        Returns:
            As `MultiHeadAttention.forward`: (B, T, d_out), and (B, H, T, T) or None.
        """
        output: tuple[Tensor, Tensor | None] = self.attention(self.embedding(token_ids), **options)
        return output
