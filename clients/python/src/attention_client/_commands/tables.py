"""Prints descriptions of models and results as text or JSON, or writes results to files.

Notation: T rows of a sequence, Tq query rows, Tk key rows, d elements of a row.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attention_client._commands.arrays import Arrays, as_lists, check_output, write
from attention_client._commands.session import Session
from attention_client._models import CostInfo, EncoderInfo, ModelInfo, ParityInfo, TensorInfo
from attention_client._values import AnyResult, Array, FloatArray

_Row: TypeAlias = Sequence[str]
_SHOWN_ELEMENTS = 6
_PRINT = Path("-")


def print_json(value: object) -> None:
    """Prints one JSON document."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_models(models: Sequence[ModelInfo]) -> None:
    """Prints one row for each model, within the width of the terminal, and why models failed."""
    listing = Table("MODEL", "VERSION", "STATE", "INPUTS", "MAX ERROR", box=None, pad_edge=False)
    for model in models:
        error = f"{model.parity.measured_max_abs_error:.1e}" if model.parity else "-"
        inputs = "\n".join(_tensor(tensor, "?") for tensor in model.inputs) or "-"
        listing.add_row(*(Text(cell) for cell in (model.name, model.version, model.state, inputs, error)))
    for column in (listing.columns[0], listing.columns[3]):
        column.overflow = "fold"
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        console.print(listing)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
    for model in models:
        if model.state_reason:
            typer.echo(f"{model.name} {model.version}: {model.state}: {model.state_reason}")


def table(rows: Sequence[_Row], *, numbers: bool = False) -> str:
    """Aligns the columns to the left or, if they hold numbers, all but the first to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    aligns = ["<", *(">" if numbers else "<" for _ in widths[1:])]
    lines = (
        "  ".join(
            f"{cell:{align}{width}}" for cell, align, width in zip(row, aligns, widths, strict=True)
        ).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def word_labels(text: str, count: int) -> list[str]:
    """The words of a text without commas if they are as many as its tokens; otherwise numbers."""
    words = text.replace(",", "").split()
    return words if len(words) == count else [str(index) for index in range(count)]


def offset_labels(text: str, offsets: NDArray[np.int64]) -> list[str]:
    """The characters of each token of a text, given its offsets (T, 2)."""
    return [f"{start}:{end} {text[start:end]!r}" for start, end in offsets.tolist()]


def vectors_table(labels: Sequence[str], vectors: FloatArray) -> str:
    """The first elements of each row of (T, d)."""
    more = ("...",) if vectors.shape[1] > _SHOWN_ELEMENTS else ()
    numbers = ([f"{number: .4f}" for number in row[:_SHOWN_ELEMENTS]] for row in vectors)
    return table([("  " + label, *row, *more) for label, row in zip(labels, numbers, strict=True)])


def weights_table(labels: Sequence[str], weights: FloatArray, rows: Sequence[str] | None = None) -> str:
    """The weights of one head, (Tq, Tk): a row for each query, a column for each key.

    Args:
        labels: One for each key.
        weights: The weights.
        rows: One for each query; None means the labels of the keys.

    White space within a label is shown as one space, and a label of white space only as a dot.
    """
    numbers = ([f"{number:.2f}" for number in row] for row in weights)
    body = [("  " + _one_line(label), *row) for label, row in zip(rows or labels, numbers, strict=True)]
    return table([("", *map(_one_line, labels)), *body], numbers=True)


def _one_line(label: str) -> str:
    return " ".join(label.split()) or "·"


def description(model: ModelInfo) -> str:
    """All that the server states about a model, one line for each property."""
    lines = [
        ("name", model.name),
        ("version", model.version),
        ("state", _state(model)),
        ("description", model.description or "-"),
        *_listed("inputs", model.inputs, "optional"),
        *_listed("outputs", model.outputs, "on request"),
        ("text", "accepted" if model.accepts_text else "not accepted"),
        *_encoder(model.text_encoder),
        ("heads", "- (not an attention module)" if model.num_heads is None else str(model.num_heads)),
        ("causal", _causal(model)),
        ("parameters", f"{model.parameters:,}"),
        *_operations(model.cost),
        ("parity", _full_parity(model.parity)),
        ("provider", model.provider or "-"),
    ]
    return table(lines)


def _encoder(encoder: EncoderInfo | None) -> list[_Row]:
    """What sets a text encoder apart."""
    if encoder is None:
        return []
    found = [("layers", str(encoder.num_layers))]
    found += [("dimensions", ", ".join(map(str, encoder.dimensions)))] if encoder.dimensions else []
    default = f"; default {encoder.default_prompt}" if encoder.default_prompt else ""
    found += [("prompts", ", ".join(encoder.prompts) + default)] if encoder.prompts else []
    return [*found, ("long texts", "truncated" if encoder.truncates else "refused")]


def _causal(model: ModelInfo) -> str:
    if model.num_heads is None:
        return "-"
    return "yes" if model.causal else "no"


def _state(model: ModelInfo) -> str:
    return f"{model.state}: {model.state_reason}" if model.state_reason else model.state


def _tensor(tensor: TensorInfo, mark: str = "") -> str:
    axes = ", ".join(_axis(str(axis), tensor) for axis in tensor.axes)
    return f"{tensor.name}{mark if tensor.optional else ''} {tensor.data_type} ({axes})"


def _axis(axis: str, tensor: TensorInfo) -> str:
    return f"{axis} <= {tensor.max_lengths[axis]}" if axis in tensor.max_lengths else axis


def _listed(label: str, tensors: Sequence[TensorInfo], when_optional: str) -> list[_Row]:
    """One line for each tensor; the label precedes the first."""
    texts = [
        f"{_tensor(tensor)}, {when_optional}" if tensor.optional else _tensor(tensor) for tensor in tensors
    ]
    return [(label if index == 0 else "", text) for index, text in enumerate(texts or ["-"])]


def _full_parity(parity: ParityInfo | None) -> str:
    if parity is None:
        return "-"
    limit = f"{parity.absolute_tolerance:.2g} + {parity.relative_tolerance:.2g} x |eager|"
    return f"|served - eager| <= {limit}; largest measured: {parity.measured_max_abs_error:.2g}"


def _operations(cost: CostInfo | None) -> list[_Row]:
    """Floating-point operations."""
    if cost is None:
        return [("operations", "unknown")]
    return [
        ("operations", f"{cost.flops_per_query:,} for each query row"),
        ("", f"{cost.flops_per_key:,} for each key row"),
        ("", f"{cost.flops_per_pair:,} for each pair of a query row and a key row"),
    ]


def check_outputs(out: Path | None, weights: Path | None, *, several: bool) -> None:
    """Refuses files that cannot hold a result, before it is computed.

    Args:
        out: File of the context vectors; None prints them.
        weights: File of the attention weights; "-" prints them, None does not compute them.
        several: Whether the result is a list of sequences.
    """
    check_output("--out", out, several=several)
    check_output("--weights", None if weights == _PRINT else weights, several=several)


def print_result(
    session: Session,
    result: AnyResult,
    out: Path | None,
    weights: Path | None,
    *,
    texts: Sequence[str] | None = None,
) -> None:
    """Writes the files that were named and prints the rest."""
    weights_file = None if weights == _PRINT else weights
    files = ((out, result.context_vectors), (weights_file, result.attention_weights))
    for path, arrays in files:
        if path is not None and arrays is not None:
            write("--out", path, arrays)
    if session.json:
        # An array that was written to a file is replaced by the file's name.
        vectors, computed = (as_lists(arrays) if path is None else str(path) for path, arrays in files)
        offsets = {} if result.offsets is None else {"offsets": as_lists(result.offsets)}
        names = {"model_name": result.model_name, "model_version": result.model_version}
        print_json({**names, "context_vectors": vectors, "attention_weights": computed, **offsets})
        return
    model = f"{result.model_name} {result.model_version}"
    if out is not None:
        typer.echo(f"{out}: {_shapes(result.context_vectors)} float32 from {model}")
    else:
        for index, rows in enumerate(_sequences(result.context_vectors)):
            text = None if texts is None else texts[index]
            typer.echo(f"{text or f'sequence {index}'}  {rows.shape}, {model}")
            labels = word_labels(text or "", len(rows))
            if text is not None and result.offsets is not None:
                labels = offset_labels(text, result.offsets[index])
            typer.echo(vectors_table(labels, rows), nl=False)
    if result.attention_weights is not None:
        if weights_file is None:
            _print_weights(result.attention_weights, texts)
        else:
            typer.echo(f"{weights_file}: {_shapes(result.attention_weights)} float32")


def _print_weights(weights: Arrays, texts: Sequence[str] | None) -> None:
    for index, heads in enumerate(_sequences(weights, rank=3)):
        text = None if texts is None else texts[index]
        *leading, queries, keys = heads.shape  # those of an encoder have layers
        labels = word_labels(text or "", keys)
        rows = labels if queries == keys else word_labels("", queries)
        for at in np.ndindex(*leading):
            where = ", ".join(
                f"{name} {i}" for name, i in zip(("layer", "head")[-len(at) :], at, strict=True)
            )
            title = f"\n{text or f'sequence {index}'}, {where}; rows are queries, columns keys"
            typer.echo(f"{title}\n{weights_table(labels, heads[at], rows)}", nl=False)


def _sequences(arrays: Arrays, rank: int = 2) -> list[Array]:
    """The sequences of a result, whatever its form."""
    if isinstance(arrays, list):
        return arrays
    return list(arrays.reshape(-1, *arrays.shape[-rank:]))


def _shapes(arrays: Arrays) -> str:
    return ", ".join(str(array.shape) for array in arrays) if isinstance(arrays, list) else str(arrays.shape)
