"""Prints the result of a command that computes, or writes it to files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import typer

from attention_client._commands.arrays import Arrays, as_lists, check_output, write_arrays
from attention_client._commands.session import Session
from attention_client._commands.tables import (
    offset_labels,
    print_json,
    vectors_table,
    weights_table,
    word_labels,
)
from attention_client._values import AnyResult, Array

_PRINT = Path("-")


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
            write_arrays(path, arrays)
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
