"""Prints the result of a command that computes, or writes it to files."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Output:
    """The destinations of a result, checked before it is computed.

    Attributes:
        vectors: File of the context vectors; None prints them.
        weights: File of the attention weights; "-" prints them, None does not compute them.
        several: Whether the result is a list of sequences.
    """

    vectors: Path | None
    weights: Path | None
    several: bool

    def __post_init__(self) -> None:
        check_output("--out", self.vectors, several=self.several)
        check_output("--weights", self.weights_file, several=self.several)

    @property
    def wants_weights(self) -> bool:
        """Whether to compute attention weights."""
        return self.weights is not None

    @property
    def weights_file(self) -> Path | None:
        """The file to write the attention weights to, if any."""
        return None if self.weights == _PRINT else self.weights


def print_result(
    session: Session, result: AnyResult, output: Output, *, texts: Sequence[str] | None = None
) -> None:
    """Writes the files that were named and prints the rest."""
    vectors, weights = result.context_vectors, result.attention_weights
    if output.vectors is not None:
        write_arrays(output.vectors, vectors)
    if output.weights_file is not None and weights is not None:
        write_arrays(output.weights_file, weights)
    if session.json:
        print_json(_as_json(result, output))
        return
    model = f"{result.model_name} {result.model_version}"
    if output.vectors is not None:
        typer.echo(f"{output.vectors}: {_shapes(vectors)} float32 from {model}")
    else:
        for index, rows in enumerate(_sequences(vectors)):
            text = None if texts is None else texts[index]
            typer.echo(f"{text or f'sequence {index}'}  {rows.shape}, {model}")
            labels = _labels(text, len(rows))
            if text is not None and result.offsets is not None:
                labels = offset_labels(text, result.offsets[index])
            typer.echo(vectors_table(labels, rows), nl=False)
    if weights is not None:
        _print_weights(weights, output, texts)


def _print_weights(weights: Arrays, output: Output, texts: Sequence[str] | None) -> None:
    if output.weights_file is not None:
        typer.echo(f"{output.weights_file}: {_shapes(weights)} float32")
        return
    for index, heads in enumerate(_sequences(weights, rank=3)):
        text = None if texts is None else texts[index]
        *leading, queries, keys = heads.shape  # those of an encoder have layers
        labels = _labels(text, keys)
        rows = labels if queries == keys else _labels(None, queries)
        for at in np.ndindex(*leading):
            where = ", ".join(
                f"{name} {i}" for name, i in zip(("layer", "head")[-len(at) :], at, strict=True)
            )
            title = f"\n{text or f'sequence {index}'}, {where}; rows are queries, columns keys"
            typer.echo(f"{title}\n{weights_table(labels, heads[at], rows)}", nl=False)


def _as_json(result: AnyResult, output: Output) -> dict[str, object]:
    """The result as JSON; an array that was written to a file is replaced by the file's name."""
    vectors, weights = result.context_vectors, result.attention_weights
    offsets = {} if result.offsets is None else {"offsets": as_lists(result.offsets)}
    return {
        "model_name": result.model_name,
        "model_version": result.model_version,
        "context_vectors": as_lists(vectors) if output.vectors is None else str(output.vectors),
        "attention_weights": as_lists(weights) if output.weights_file is None else str(output.weights_file),
        **offsets,
    }


def _sequences(arrays: Arrays, rank: int = 2) -> list[Array]:
    """The sequences of a result, whatever its form."""
    if isinstance(arrays, list):
        return arrays
    return list(arrays.reshape(-1, *arrays.shape[-rank:]))


def _shapes(arrays: Arrays) -> str:
    return ", ".join(str(array.shape) for array in arrays) if isinstance(arrays, list) else str(arrays.shape)


def _labels(text: str | None, count: int) -> list[str]:
    return word_labels(text or "", count)
