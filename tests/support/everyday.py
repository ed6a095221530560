"""Modules as people write them with PyTorch and Hugging Face, with masks of keys: a table to export."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH, HEADS, IDS = 16, 2, 20
DTYPES = {"bool": torch.bool, "ids": torch.int64}
AXES = {"B": "batch", "T": "length", "S": "memory_length"}
EXAMPLE_SIZES = {"B": 2, "T": 3, "S": 5}
causal_mask = nn.Transformer.generate_square_subsequent_mask


@dataclass(frozen=True)
class Input:
    """An input as a line of the table states it: "B T 16", "B T bool"."""

    text: str

    @property
    def sizes(self) -> list[str]:
        return [part for part in self.text.split() if part not in DTYPES]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.text.split()[-1], torch.float32)

    @property
    def axes(self) -> dict[int, str]:
        return {at: AXES[size] for at, size in enumerate(self.sizes) if size in AXES}

    @property
    def example(self) -> Tensor:
        shape = [EXAMPLE_SIZES.get(size) or int(size) for size in self.sizes]
        return (
            torch.full(shape, IDS - 1) if self.dtype is torch.int64 else torch.zeros(shape, dtype=self.dtype)
        )


@dataclass(frozen=True)
class Row:
    """A module, its inputs, and its outputs."""

    make: Callable[[], nn.Module]
    signature: str
    outputs: tuple[str, ...] = ("context_vectors",)

    @property
    def inputs(self) -> dict[str, Input]:
        named = (part.split(": ") for part in self.signature.split("; "))
        return {name: Input(text) for name, text in named}

    def module(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().eval()


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one sequence, with the weights of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Any:
        return self.attention(x, x, x, key_padding_mask=key_padding_mask, average_attn_weights=False)


class Located(nn.Module):
    """Cross-attention whose last input belongs to the query rows, as in a decoder of DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(
        self, x: Tensor, memory: Tensor, place: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        context: Tensor = self.attention(x + place, memory, memory, key_padding_mask=key_padding_mask)[0]
        return context


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 32, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        mask = causal_mask(x.shape[1])
        encoded: Tensor = self.encoder(x, mask=mask, src_key_padding_mask=src_key_padding_mask)
        return encoded


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(x, memory)
        return decoded


class Translator(nn.Module):
    """A whole encoder-decoder over token ids, which hides padding by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, IDS)

    def forward(
        self, src: Tensor, tgt: Tensor, src_attention_mask: Tensor, tgt_attention_mask: Tensor
    ) -> Tensor:
        rows = self.transformer(
            self.embedding(src),
            self.embedding(tgt),
            tgt_mask=causal_mask(tgt.shape[1]),
            src_key_padding_mask=src_attention_mask == 0,
            tgt_key_padding_mask=tgt_attention_mask == 0,
            memory_key_padding_mask=src_attention_mask == 0,
        )
        logits: Tensor = self.head(rows)
        return logits


class Ranker(nn.Module):
    """A target item attends to a history of items, as in a deep interest network: one score."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(2 * WIDTH + 1, 1)

    def forward(self, history: Tensor, item: Tensor, price: Tensor, history_attention_mask: Tensor) -> Tensor:
        target, hidden = self.embedding(item), history_attention_mask == 0  # (B, d), (B, T)
        rows = self.embedding(history)
        interest = self.attention(target[:, None], rows, rows, key_padding_mask=hidden)[0][:, 0]
        score: Tensor = self.head(torch.cat([interest, target, price[:, None]], 1))[:, 0]
        return score


class Columns(nn.Module):
    """Attention between the columns of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(6, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layer(columns[..., None] * self.weights)
        return rows, rows.mean(1).argmax(-1).int()


class Patches(nn.Module):
    """Patches of an image of a fixed size, after a class token, and a vector for what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        patches = self.patch(image).flatten(2).transpose(1, 2)
        encoded: Tensor = self.layer(torch.cat([self.token + question[:, None], patches], 1))
        return encoded


class Strided(nn.Module):
    """A convolution of stride 2 before attention, as for spectrograms."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.layer(self.convolution(x.transpose(1, 2)).transpose(1, 2))
        return encoded


class ClassToken(nn.Module):
    """A class token before the rows; keys and values that belong to the layer; the weights of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Any:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.attention(rows, rows, rows, average_attn_weights=False)


class MaskedClassToken(nn.Module):
    """A class token before rows that a mask may hide."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        hidden = F.pad(key_padding_mask, (1, 0))
        encoded: Tensor = self.layer(rows, src_key_padding_mask=hidden)
        return encoded


SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES | {"vocab_size": IDS, "attn_implementation": "sdpa"})
    return transformers.BertModel(config, add_pooling_layer=False)


X = "x: B T 16"
LOCATED = f"{X}; memory: B S 16; place: B T 16"
WITH_WEIGHTS = ("context_vectors", "weights")
# Each row shows a layer or a library that neither another row nor random_modules.py shows.
ROWS: dict[str, Row] = {
    # nn.MultiheadAttention
    "self, keys, weights of heads": Row(
        SelfAttention, f"{X}; key_padding_mask: B T bool", outputs=WITH_WEIGHTS
    ),
    "cross, the keys between two inputs of query rows": Row(Located, LOCATED),
    "cross, masked keys between two inputs of query rows": Row(
        Located, f"{LOCATED}; key_padding_mask: B S bool"
    ),
    # PyTorch's layers
    "encoder, causal, keys, norm first": Row(Encoder, f"{X}; src_key_padding_mask: B T bool"),
    "encoder layer, keys": Row(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True),
        "src: B T 16; src_key_padding_mask: B T bool",
    ),
    "decoder layer": Row(Decoder, f"{X}; memory: B S 16"),
    "translator of ids": Row(
        Translator, "src: B S ids; tgt: B T ids; src_attention_mask: B S ids; tgt_attention_mask: B T ids"
    ),
    # Inputs without a sequence axis, and outputs of other lengths
    "ranker": Row(Ranker, "history: B T ids; item: B ids; price: B; history_attention_mask: B T ids"),
    "columns": Row(Columns, "columns: B 6", outputs=("context_vectors", "best")),
    "patches": Row(Patches, "image: B 3 8 8; question: B 16"),
    "strided": Row(Strided, X),
    "class token, weights of heads": Row(ClassToken, X, outputs=WITH_WEIGHTS),
    "class token, keys": Row(MaskedClassToken, f"{X}; key_padding_mask: B T bool"),
    # Hugging Face
    "BERT, sdpa": Row(bert, "input_ids: B T ids; attention_mask: B T ids"),
}
