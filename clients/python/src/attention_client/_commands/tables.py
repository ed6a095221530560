"""Prints descriptions of models and results as text or JSON, or writes results to files.

Notation: T rows of a sequence, Tq query rows, Tk key rows, d elements of a row.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client._commands.arrays import as_lists, labelled, write
from attention_client._commands.session import Session
from attention_client._models import ModelInfo, TensorInfo
from attention_client._values import AnyResult, Array, FloatArray, InferResult

_Row: TypeAlias = Sequence[str]
_SHOWN_ELEMENTS = 6
# Larger outputs are printed in part.
_MOST_SHOWN = 100
_PRINT = Path("-")


def print_json(value: object) -> None:
    """Prints one JSON document."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_models(models: Sequence[ModelInfo]) -> None:
    """Prints one row for each model and further ones for its other inputs, and why models failed.

    The column TEXT says which models take texts.
    """
    rows: list[_Row] = [("MODEL", "VERSION", "STATE", "TEXT", "MAX ERROR", "INPUTS")]
    for model in models:
        error = f"{model.parity.measured_max_abs_error:.1e}" if model.parity else "-"
        first, *further = [_tensor(tensor) for tensor in model.inputs] or ["-"]
        text = "yes" if model.accepts_text else "-"
        rows.append((model.name, model.version, model.state, text, error, first))
        rows += [("", "", "", "", "", tensor) for tensor in further]
    typer.echo(table(rows), nl=False)
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


def token_labels(text: str, offsets: NDArray[np.int64], *, positions: bool = False) -> list[str]:
    """The characters of each token of a text, given its offsets (T, 2); a dot for a token without any."""
    tokens = ((start, end, text[start:end]) for start, end in offsets.tolist())
    return [f"{start}:{end} {token!r}" if positions else token or "·" for start, end, token in tokens]


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
    """All that the server states about a model, by the names of ModelInfo, one line for each value."""
    return table(list(_values("", model)))


def _values(name: str, value: Any) -> Iterator[_Row]:
    if isinstance(value, TensorInfo):
        yield name, _tensor(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _values(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, tuple) and value:
        for index, item in enumerate(value):
            yield from _values(f"{name}[{index}]", item)
    else:
        yield name, "-" if value in (None, "", ()) else str(value)


def _tensor(tensor: TensorInfo) -> str:
    axes = ", ".join(_axis(axis, tensor) for axis in map(str, tensor.axes))
    bounds = tensor.exclusive_upper_bounds
    columns = " by column" if len(bounds) > 1 else ""
    ids = f" 0 <= id < {', '.join(map(str, bounds))}{columns}" if bounds else ""
    return f"{tensor.name} {tensor.data_type} ({axes}){ids}{' optional' if tensor.optional else ''}"


def _axis(axis: str, tensor: TensorInfo) -> str:
    least = f"{tensor.min_lengths[axis]} <= " if axis in tensor.min_lengths else ""
    most = f" <= {tensor.max_lengths[axis]}" if axis in tensor.max_lengths else ""
    multiple = tensor.length_multiples.get(axis)
    return f"{least}{axis}{most}{f' in multiples of {multiple}' if multiple else ''}"


def print_result(
    session: Session,
    result: AnyResult,
    out: Path | None,
    weights: Path | None,
    *,
    texts: Sequence[str] | None = None,
    positions: bool = False,
) -> None:
    """Writes the files that were named and prints the rest.

    Args:
        session: The session.
        result: The result; of texts, with offsets.
        out: File of the context vectors; None prints them.
        weights: File of the attention weights; "-" prints them.
        texts: The texts, whose tokens are printed beside their vectors.
        positions: Whether to print where each token is in its text.
    """
    outputs = {"context_vectors": (out, result.context_vectors)}
    if result.attention_weights is not None:
        outputs["attention_weights"] = (None if weights == _PRINT else weights, result.attention_weights)
    for path, arrays in outputs.values():
        if path is not None:
            write("--out", path, arrays)
    if session.json:
        # An array that was written to a file is replaced by the file's name.
        lists = {name: str(path) if path else as_lists(array) for name, (path, array) in outputs.items()}
        offsets = {"offsets": as_lists(result.offsets)} if positions else {}
        names = {"model_name": result.model_name, "model_version": result.model_version}
        print_json({**names, "attention_weights": None, **lists, **offsets})
        return
    for name, (path, arrays) in outputs.items():
        for index, (label, array) in enumerate(labelled(name, arrays)):
            if texts is None or name != "context_vectors":
                print_array(label, array, result, path)
            else:
                places: Any = result.offsets
                tokens = token_labels(texts[index], places[index], positions=positions)
                print_array(texts[index], array, result, path, vectors_table(tokens, array))


def print_array(
    label: str, array: Array, result: AnyResult | InferResult, path: Path | None, text: str = ""
) -> None:
    """Prints one line about an array, and its elements unless they were written to a file."""
    where = "" if path is None else f"{path}: "
    typer.echo(f"{where}{label}  {array.shape} {array.dtype}, {result.model_name} {result.model_version}")
    if path is None:
        elements = text or np.array2string(array, precision=4, suppress_small=True, threshold=_MOST_SHOWN)
        typer.echo(elements.rstrip())
