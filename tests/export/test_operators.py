"""Modules with operators that the exporter does not know in every form, and modules with a memory."""

# ruff: noqa: ARG001, ARG005

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention_serving.export import ExportError, export_module
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.in_process import InProcessModel

AXES = {"x": {0: "batch", 1: "sequence"}}
WIDTH, LONGEST = 8, 36


class Computes(nn.Module):
    """A function with layers and state."""

    def __init__(
        self, function: Callable[..., Tensor], *layers: nn.Module, kept: Tensor | None = None
    ) -> None:
        super().__init__()
        self.layers, self.function, self.kept = nn.ModuleList(layers), function, kept
        self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def learned_queries(module: Computes, x: Tensor) -> Tensor:
    queries = module.queries.expand(len(x), -1, -1)
    return queries @ x.mT @ x / x.shape[1]


def shared_key_head(module: Computes, x: Tensor) -> Tensor:
    query = x.reshape(*x.shape[:2], 4, 2).transpose(1, 2)
    key = x[:, None, :, :2]
    return F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)


def windows(module: Computes, x: Tensor) -> Tensor:
    """Shifted windows of 4 rows in 5-D, padded."""
    batch, length, width = x.shape
    padding = -length % 4
    rows = torch.roll(F.pad(x, (0, 0, 0, padding)), -2, 1).view(batch, -1, 4, 2, width // 2).transpose(2, 3)
    mask = (torch.arange(length + padding) < length).view(1, -1, 1, 1, 4)
    rows = F.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask | torch.eye(4).bool())
    return torch.roll(rows.transpose(2, 3).reshape(batch, length + padding, width), 2, 1)[:, :length]


def rotary(module: Computes, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.1]))
    turn = torch.exp(1j * angles)[None, :, None]
    rows = torch.view_as_complex(x.reshape(*x.shape[:2], 2, 2, 2)) * turn.expand(len(x), -1, 2, -1)
    rows = torch.view_as_real(rows * 0.5).flatten(3).transpose(1, 2)
    return F.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).flatten(2)


def recurrent(module: Computes, x: Tensor) -> Tensor:
    lstm, gru, rnn = module.layers
    x, (hidden, cell) = lstm(x)
    x, _ = gru(x.transpose(0, 1), torch.zeros(1, x.shape[0], 5))
    rows: Tensor = rnn(x.transpose(0, 1))[0] + hidden[-1][:, None] + cell[0][:, None]
    return rows


def kept_mask(module: Computes, x: Tensor) -> Tensor:
    if module.kept is None or module.kept.size(0) != x.size(1):
        module.kept = torch.ones(x.size(1), x.size(1)).tril().bool()
    return F.scaled_dot_product_attention(x, x, x, attn_mask=module.kept)


def growing_table(module: Computes, x: Tensor) -> Tensor:
    if module.kept is None or x.size(1) > module.kept.size(0):
        module.kept = torch.arange(2.0 * x.size(1)).sin()
    return x * module.kept[: x.size(1), None]


def tables_by_length(module: Computes, x: Tensor) -> Tensor:
    if x.shape[1] not in module.tables and module.kept is not None:
        module.tables[x.shape[1]] = torch.arange(x.shape[1])[:, None] * module.kept.item()
    return x + module.tables[x.shape[1]]


def view_of_a_layer(module: Computes, x: Tensor) -> Tensor:
    """What the layer returns in four rows can be viewed as a sequence if its fused operator computed it."""
    rows = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).reshape(-1, 4, WIDTH)
    rows = module.layers[0](rows, rows, rows, need_weights=False)[0]
    viewed: Tensor = rows.view(len(x), -1, WIDTH)[:, : x.shape[1]]
    return viewed


def flexible(module: Computes, x: Tensor) -> Tensor:
    rows, length = x.reshape(*x.shape[:2], 2, 4).transpose(1, 2), x.shape[1]
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 5), None, None, length, length, "cpu")
    result = flex_attention(rows, rows, rows, lambda s, b, h, i, j: s - (i - j) * 0.1 * h, mask)
    assert isinstance(result, Tensor)
    return result.transpose(1, 2).flatten(2)


def half_of_the_keys(module: Computes, x: Tensor) -> Tensor:
    keys = x[:, : -(-x.shape[1] // 2)]
    return F.scaled_dot_product_attention(x, keys, keys)


FORMS = {
    "learned queries": lambda: Computes(learned_queries),
    "shared key head": lambda: Computes(shared_key_head),
    "windows": lambda: Computes(windows),
    "complex rotary": lambda: Computes(rotary),
    "recurrent": lambda: Computes(
        recurrent,
        nn.LSTM(WIDTH, 3, 2, bidirectional=True, batch_first=True),
        nn.GRU(6, 5, bias=False),
        nn.RNN(5, 3, nonlinearity="relu", batch_first=True),
    ),
    "kept mask": lambda: Computes(kept_mask),
    "growing table": lambda: Computes(growing_table, kept=torch.arange(8.0).sin()),
    "tables by length": lambda: Computes(tables_by_length, kept=torch.tensor(0.25)),
    "view of a layer": lambda: Computes(view_of_a_layer, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "strides": lambda: Computes(lambda module, x: module.layers[0](x.mT).mT, nn.Conv1d(WIDTH, 3, 3, 4, 1)),
    "half of the keys": lambda: Computes(half_of_the_keys),
    "flexible": lambda: Computes(flexible),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_is_served_as_it_is(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = FORMS[form]().eval()
    export_module(module, {"x": torch.randn(2, 3, WIDTH)}, AXES, out=tmp_path, name="m", max_length=LONGEST)
    model = InProcessModel.load(tmp_path, "m", parallel_runs=1)
    rows = [torch.randn(length, WIDTH) for length in (1, 2, 9, LONGEST - 3, LONGEST)]
    served = model.submit({"x": [x.numpy() for x in rows]}).result().outputs["context_vectors"]
    model.close()
    for x, result in zip(rows, served, strict=True):
        with torch.inference_mode():
            np.testing.assert_allclose(result, module(x[None])[0], rtol=1e-4, atol=1e-5)


class ReadsColumns(nn.Module):
    """Two columns of ids, each with an embedding, and rows of which flags show some."""

    def __init__(self) -> None:
        super().__init__()
        self.colours, self.sizes = nn.Embedding(5, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, columns: Tensor, x: Tensor, shown: Tensor) -> Tensor:
        query = self.colours(columns[:, 0]) + self.sizes(columns[:, 1])
        scores = (x @ query[:, :, None])[..., 0].masked_fill(~shown, float("-inf"))
        pooled: Tensor = (scores.softmax(1)[..., None] * x).sum(1)
        return pooled


def test_columns_of_ids_have_ranges_and_flags_show_a_row_of_each_sequence(tmp_path: Path) -> None:
    example = {
        "columns": torch.tensor([[0, 8], [1, 2]]), "x": torch.randn(2, 3, WIDTH),
        "shown": torch.ones(2, 3, dtype=torch.bool),
    }  # fmt: skip
    module = ReadsColumns()
    export_module(module, example, out=tmp_path, name="m", max_length=LONGEST)
    model = InProcessModel.load(tmp_path, "m", parallel_runs=1)
    inputs = {name: [*values.numpy()] for name, values in example.items()}
    served = model.submit(inputs).result().outputs["context_vectors"]
    np.testing.assert_allclose(np.stack(served), module(**example).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="columns: contains id 6; ids must be between 0 and 4"):
        model.submit(inputs | {"columns": [np.array([6, 6])] * 2}).result()
    model.close()


def test_lengths_are_multiples_if_a_module_takes_no_others(tmp_path: Path) -> None:
    module = Computes(lambda module, x: x.reshape(-1, 4, WIDTH).cumsum(1).reshape(x.shape))
    _, manifest = export_module(
        module, {"x": torch.randn(2, 8, WIDTH)}, AXES, out=tmp_path, name="m", max_length=LONGEST
    )
    assert manifest.length_multiples == {"sequence": 4}
    model = InProcessModel.load(tmp_path, "m", parallel_runs=1)
    rows = np.ones((7, WIDTH), np.float32)
    with pytest.raises(LimitExceededError, match="a sequence has 7 rows; this model takes multiples of 4"):
        model.submit({"x": [rows]}).result()
    model.close()


def changes_input(module: Computes, x: Tensor) -> Tensor:
    return x.mul_(2.0)


def keeps_rows(module: Computes, x: Tensor) -> Tensor:
    module.kept = x if module.kept is None else torch.cat([module.kept, x], 1)
    return F.scaled_dot_product_attention(x, module.kept, module.kept)


def keeps_scale(module: Computes, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = x.std()
    return x / module.kept


def draws(module: Computes, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def repeats_a_list(module: Computes, x: Tensor) -> Tensor:
    return torch.cat([module.queries] * len(x)) @ x.mT @ x


REFUSALS = {
    "changes its input": (Computes(changes_input), "changes its input 'x' in place, at .*x.mul_"),
    "keeps rows": (Computes(keeps_rows), "keeps self.kept between calls, at .*module.kept = x"),
    "keeps a scale": (Computes(keeps_scale), "keeps self.kept between calls, at .*module.kept = x.std"),
    "draws": (Computes(draws), "draws random numbers"),
    "projection": (
        Computes(lambda module, x: module.layers[0](x)[0], nn.LSTM(WIDTH, 6, proj_size=3, batch_first=True)),
        "ONNX has no LSTM with proj_size: use a Linear after it, at ",
    ),
    "packed": (
        Computes(
            lambda module, x: nn.utils.rnn.pack_padded_sequence(x, torch.ones(len(x)), batch_first=True).data
        ),
        "ONNX has no packed sequences: .*, at ",
    ),
    "list": (Computes(repeats_a_list), r"fixes the size of an axis.*test_operators.py:\d+: .* a Python list"),
}


@pytest.mark.parametrize(("module", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_names_cause_and_line(module: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(
            module, {"x": torch.randn(2, 3, WIDTH)}, AXES, out=tmp_path, name="m", max_length=LONGEST
        )
