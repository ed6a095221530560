"""Everyday modules with everyday masks: exported, served, and equal to eager PyTorch.

Callers of eager PyTorch pad sequences and pass masks; callers of the server send the sequences themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attention_client import AttentionClient
from torch import Tensor, nn

from attention_serving.export import export_module
from attention_serving.export.precision import Precision
from scripts.local_server import serving
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array

pytestmark = pytest.mark.thorough
WIDTH, HEADS, IDS = 16, 2, 20
causal_mask = nn.Transformer.generate_square_subsequent_mask


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one sequence, with the weights of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Any:
        return self.attention(x, x, x, key_padding_mask=key_padding_mask, average_attn_weights=False)


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


def bert() -> nn.Module:
    sizes = {"vocab_size": IDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "intermediate_size": 32}
    options: dict[str, Any] = {**sizes, "num_attention_heads": HEADS, "attn_implementation": "sdpa"}
    config = transformers.BertConfig(**options)
    return transformers.BertModel(config, add_pooling_layer=False)


@dataclass(frozen=True)
class Everyday:
    """A module, an example of each input, and the names of its outputs."""

    make: Callable[[], nn.Module]
    examples: dict[str, Tensor]
    outputs: tuple[str, ...] = ("context_vectors",)

    def module(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().eval()


# Axis 1 of an example has the name of its size.
AXES = {3: "length", 5: "memory_length"}
X, HIDDEN = torch.zeros(2, 3, WIDTH), torch.zeros(2, 3, dtype=torch.bool)
TOKENS, SOURCE = (torch.full((2, length), IDS - 1) for length in AXES)
# Each shows a layer or a library that neither another one nor tests/data/module_grammar.toml shows.
MODULES = {
    "weights": Everyday(
        SelfAttention, {"x": X, "key_padding_mask": HIDDEN}, outputs=("context_vectors", "weights")
    ),
    "encoder": Everyday(Encoder, {"x": X, "src_key_padding_mask": HIDDEN}),
    "translator": Everyday(
        Translator,
        {
            "src": SOURCE,
            "tgt": TOKENS,
            "src_attention_mask": torch.ones_like(SOURCE),
            "tgt_attention_mask": torch.ones_like(TOKENS),
        },
    ),
    "bert": Everyday(bert, {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}),
}
# Some are equal on one axis, and differ on the other.
LENGTHS = ({3: 7, 5: 5}, {3: 4, 5: 9}, {3: 4, 5: 3}, {3: 7, 5: 3})
# Those that ONNX Runtime computes on a CPU.
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.INT8)


def export_everyday(name: str, precision: Precision, folder: Path) -> None:
    everyday = MODULES[name]
    export_module(
        everyday.module(),
        everyday.examples,
        {key: {0: "batch", 1: AXES[example.shape[1]]} for key, example in everyday.examples.items()},
        out=folder,
        name=f"{name}-{precision}",
        output_names=everyday.outputs,
        precision=precision,
        max_length=64,
    )


MODELS = ModelSet(
    "everyday",
    [partial(export_everyday, *job) for job in product(MODULES, PRECISIONS)],
    [Path(__file__)],
    ["everyday_client"],
)


@pytest.fixture(scope="module")
def everyday_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttentionClient]:
    (repository,) = cached_repositories(MODELS)
    with (
        serving(repository, tmp_path_factory.mktemp("everyday") / "log") as server,
        AttentionClient(server.target) as client,
    ):
        yield client


def random_sequence(name: str, example: Tensor, lengths: dict[int, int], rng: np.random.Generator) -> Array:
    """One sequence of an input; of a mask, one that hides nothing."""
    shape = (lengths[example.shape[1]], *example.shape[2:])
    if name.endswith("mask"):
        return np.full(shape, not name.endswith("key_padding_mask"), example.numpy().dtype)
    if example.is_floating_point():
        return rng.standard_normal(shape, np.float32)
    return rng.integers(0, IDS, shape)


def eager(everyday: Everyday, tensors: dict[str, Array]) -> list[Array]:
    """The outputs of eager PyTorch for one sequence, without the batch axis."""
    with torch.inference_mode():
        outputs = everyday.module()(
            **{name: torch.from_numpy(array)[None] for name, array in tensors.items()}
        )
    if not isinstance(outputs, tuple):
        outputs = (getattr(outputs, "last_hidden_state", outputs),)
    return [output[0].numpy() for output in outputs]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODULES)
def test_equals_eager(everyday_client: AttentionClient, name: str, precision: Precision) -> None:
    """The sequences of a request have different lengths; eager PyTorch computes each of them alone."""
    model, everyday, rng = f"{name}-{precision}", MODULES[name], np.random.default_rng(3)
    parity = everyday_client.model(model).parity
    assert parity is not None
    sequences = [
        {key: random_sequence(key, example, lengths, rng) for key, example in everyday.examples.items()}
        for lengths in LENGTHS
    ]
    vectors = [key for key in everyday.examples if not key.endswith("mask")]
    inputs = {key: [sequence[key] for sequence in sequences] for key in vectors}
    results = everyday_client.infer(model, inputs, outputs=everyday.outputs).outputs
    expected = zip(*(eager(everyday, sequence) for sequence in sequences), strict=True)
    for output, answers in zip(everyday.outputs, expected, strict=True):
        for rows, answer in zip(results[output], answers, strict=True):
            np.testing.assert_allclose(
                rows, answer, rtol=parity.relative_tolerance, atol=parity.absolute_tolerance
            )
