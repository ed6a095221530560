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
from attention_client import AttentionClient, InvalidArgumentError
from torch import Tensor, nn

from attention_serving.export import export_module
from attention_serving.export.precision import Precision
from scripts.local_server import ServerProcess, serving
from tests.support import triton
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array, assert_parity

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
        self.patch = nn.Conv2d(4, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        patches = self.patch(image).flatten(2).transpose(1, 2)
        encoded: Tensor = self.layer(torch.cat([self.token + question[:, None], patches], 1))
        return encoded


class Strided(nn.Module):
    """A convolution of stride 2 and a class token before attention; the weights of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        rows = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], 1)
        return self.attention(rows, rows, rows, average_attn_weights=False)


class ClassToken(nn.Module):
    """A class token before rows that end with the length of their sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor, x_lengths: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        hidden = torch.arange(rows.shape[1]) > x_lengths[:, None]
        encoded: Tensor = self.layer(rows, src_key_padding_mask=hidden)
        return encoded


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


# Axis 1 of an example has the name of its size; it is fixed if it has another size.
AXES = {3: "length", 5: "memory_length"}
ROWS = "x_lengths"
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
# Their axes are found.
FORMS = {
    "ranker": Everyday(
        Ranker,
        {
            "history": TOKENS,
            "item": torch.zeros(2, dtype=torch.int64),
            "price": torch.zeros(2),
            "history_attention_mask": torch.ones_like(TOKENS),
        },
    ),
    "columns": Everyday(Columns, {"columns": torch.zeros(2, 6)}, outputs=("context_vectors", "best")),
    "patches": Everyday(Patches, {"image": torch.zeros(2, 4, 8, 8), "question": torch.zeros(2, WIDTH)}),
    "strided": Everyday(Strided, {"x": X}, outputs=("context_vectors", "weights")),
    "class_token": Everyday(ClassToken, {"x": X, ROWS: torch.tensor([3, 2])}),
}
# Some are equal on one axis, and differ on the other.
LENGTHS = ({3: 7, 5: 5}, {3: 4, 5: 9}, {3: 4, 5: 3}, {3: 7, 5: 3})
# Those that ONNX Runtime computes on a CPU.
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.INT8)


def export_everyday(name: str, precision: Precision, folder: Path) -> None:
    everyday = (MODULES | FORMS)[name]
    examples = everyday.examples.items()
    axes = {key: {0: "batch", 1: AXES[example.shape[1]]} for key, example in examples if name in MODULES}
    export_module(
        everyday.module(),
        everyday.examples,
        axes,
        out=folder,
        name=f"{name}-{precision}",
        output_names=everyday.outputs,
        precision=precision,
        max_length=64,
    )


MODELS = ModelSet(
    "everyday",
    [partial(export_everyday, *job) for job in product(MODULES | FORMS, PRECISIONS)],
    [Path(__file__)],
    ["everyday_client", "everyday_server"],
)


@pytest.fixture(scope="module")
def everyday_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    (repository,) = cached_repositories(MODELS)
    with serving(repository, tmp_path_factory.mktemp("everyday") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def everyday_client(everyday_server: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(everyday_server.target) as client:
        yield client


def random_sequence(name: str, example: Tensor, lengths: dict[int, int], rng: np.random.Generator) -> Array:
    """One sequence of an input; of a mask, one that hides nothing."""
    shape = tuple(lengths.get(size, size) if at == 1 else size for at, size in enumerate(example.shape))[1:]
    if name == ROWS:
        return np.array(lengths[3])
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
@pytest.mark.parametrize("name", MODULES | FORMS)
def test_equals_eager(everyday_client: AttentionClient, name: str, precision: Precision) -> None:
    """The sequences of a request have different lengths; eager PyTorch computes each of them alone."""
    model, everyday, rng = f"{name}-{precision}", (MODULES | FORMS)[name], np.random.default_rng(3)
    parity = everyday_client.model(model).parity
    assert parity is not None
    sequences = [
        {key: random_sequence(key, example, lengths, rng) for key, example in everyday.examples.items()}
        for lengths in LENGTHS
    ]
    vectors = [key for key in everyday.examples if not key.endswith(("mask", ROWS))]
    inputs = {key: [sequence[key] for sequence in sequences] for key in vectors}
    results = everyday_client.infer(model, inputs, outputs=everyday.outputs).outputs
    expected = zip(*(eager(everyday, sequence) for sequence in sequences), strict=True)
    for output, answers in zip(everyday.outputs, expected, strict=True):
        for rows, answer in zip(results[output], answers, strict=True):
            np.testing.assert_allclose(
                rows, answer, rtol=parity.relative_tolerance, atol=parity.absolute_tolerance
            )


@pytest.mark.parametrize("name", FORMS)
def test_equals_eager_over_the_open_inference_protocol(everyday_server: ServerProcess, name: str) -> None:
    """Batches of equal lengths, odd and even, and one of a single sequence."""
    everyday, rng = FORMS[name], np.random.default_rng(4)
    for batch, rows in ((3, 7), (2, 8), (1, 1)):
        sequences = [
            {key: random_sequence(key, example, {3: rows}, rng) for key, example in everyday.examples.items()}
            for _ in range(batch)
        ]
        vectors = [key for key in everyday.examples if not key.endswith(("mask", ROWS))]
        tensors = {key: np.stack([sequence[key] for sequence in sequences]) for key in vectors}
        results = triton.infer(everyday_server.target, f"{name}-fp32", tensors)
        for at, sequence in enumerate(sequences):
            for output, answer in zip(everyday.outputs, eager(everyday, sequence), strict=True):
                assert_parity(results[output][at], answer)


IDS_OF_TWO = np.zeros((2, 5), np.int64)
RANKING: dict[str, Array] = {
    "history": IDS_OF_TWO,
    "item": np.zeros(2, np.int64),
    "price": np.zeros(2, np.float32),
}
OF_IDS, OF_COLUMNS = "item: contains id 20", "sequence 0 has 7 rows; the model takes 6 in each"
OF_IMAGES = "image: rows are 8x9 wide; the model takes 8x8"
# A model, what it is sent, and the message over attention.v1 and over the Open Inference Protocol.
REFUSALS: dict[str, tuple[str, dict[str, Array], str, str]] = {
    "another batch": (
        "ranker",
        RANKING | {"item": np.zeros(3, np.int64)},
        "item: contains 3 sequences; history contains 2",
        "item: has batch 3; it must be 2",
    ),
    "scalars with an axis": (
        "ranker",
        RANKING | {"price": np.zeros((2, 1), np.float32)},
        "one sequence has 0, and one batch has 1",
        "has 2 axes; the model takes 1",
    ),
    "no such id": ("ranker", RANKING | {"item": np.full(2, IDS)}, OF_IDS, OF_IDS),
    "columns": ("columns", {"columns": np.zeros((2, 7), np.float32)}, OF_COLUMNS, OF_COLUMNS),
    "size of an image": (
        "patches",
        {"image": np.zeros((2, 4, 8, 9), np.float32), "question": np.zeros((2, WIDTH), np.float32)},
        OF_IMAGES,
        OF_IMAGES,
    ),
}


@pytest.mark.parametrize(("name", "tensors", "typed", "named"), REFUSALS.values(), ids=REFUSALS)
def test_other_sizes_are_refused(
    everyday_client: AttentionClient,
    everyday_server: ServerProcess,
    name: str,
    tensors: dict[str, Array],
    typed: str,
    named: str,
) -> None:
    with pytest.raises(InvalidArgumentError, match=typed):
        everyday_client.infer(f"{name}-fp32", tensors)
    with pytest.raises(triton.TritonError, match=named):
        triton.infer(everyday_server.target, f"{name}-fp32", tensors)
