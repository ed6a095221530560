"""The command line: changes with its commands and what they print.

Exit codes: 0 done, 1 no result (one line on stderr says why), 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attention_client.client import AttentionClient
from attention_client.connection import DEFAULT_TARGET, DEFAULT_TIMEOUT
from attention_client.errors import AttentionClientError
from attention_client.models import ModelInfo, TensorInfo
from attention_client.values import Array, FloatArray

_SHOWN_ELEMENTS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with AttentionClient(options.server, timeout=options.timeout) as client:
            options.run(client, options)
    except (AttentionClientError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attention-client", description="Asks an attention inference service for context vectors."
    )
    parser.add_argument("--server", default=DEFAULT_TARGET, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="S", help="seconds; default: %(default)s"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    models = commands.add_parser("models", help="list the server's models")
    models.set_defaults(run=_models)

    text = commands.add_parser("text", help="print the context vectors of texts")
    text.add_argument("--model", required=True, metavar="NAME")
    text.add_argument("texts", nargs="+", metavar="TEXT")
    text.set_defaults(run=_text)

    attend = commands.add_parser("attend", help="compute the context vectors of arrays in .npy files")
    attend.add_argument("--model", required=True, metavar="NAME")
    attend.add_argument("--query", required=True, type=Path, metavar="FILE", help="(T, d) or (B, T, d)")
    attend.add_argument("--key", type=Path, metavar="FILE")
    attend.add_argument("--value", type=Path, metavar="FILE")
    attend.add_argument("--out", required=True, type=Path, metavar="FILE")
    attend.set_defaults(run=_attend)
    return parser


def _models(client: AttentionClient, _: argparse.Namespace) -> None:
    header = ("NAME", "VERSION", "STATE", "INPUTS", "PARITY")
    _print_table([header, *(_model_row(model) for model in client.models())])


def _text(client: AttentionClient, options: argparse.Namespace) -> None:
    result = client.attend_text(options.model, options.texts)
    for text, vectors in zip(options.texts, result.context_vectors, strict=True):
        sys.stdout.write(f"{text}  {vectors.shape}, {result.model_name} {result.model_version}\n")
        _print_table(_vector_rows(text, vectors))


def _attend(client: AttentionClient, options: argparse.Namespace) -> None:
    query, key, value = (_load(path) for path in (options.query, options.key, options.value))
    if query is None:
        raise ValueError("--query is required")
    result = client.attend(options.model, query, key, value)
    np.save(options.out, result.context_vectors)
    shape = result.context_vectors.shape
    sys.stdout.write(f"{options.out}: {shape} float32 from {result.model_name} {result.model_version}\n")


def _load(path: Path | None) -> Array | None:
    if path is None:
        return None
    array = np.load(path)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds several arrays; give a .npy file")  # noqa: TRY004 - the file is wrong
    return array


def _model_row(model: ModelInfo) -> tuple[str, ...]:
    state = f"{model.state}: {model.state_reason}" if model.state_reason else model.state
    inputs = ", ".join(_tensor(tensor) for tensor in model.inputs) or "-"
    parity = "-"
    if model.parity is not None:
        error, limit = model.parity.measured_max_abs_error, model.parity.absolute_tolerance
        parity = f"{error:.1e} (atol {limit:.0e}, rtol {model.parity.relative_tolerance:.0e})"
    return model.name, model.version, state, inputs, parity


def _tensor(tensor: TensorInfo) -> str:
    axes = ", ".join(str(axis) for axis in tensor.axes)
    return f"{tensor.name}{'?' if tensor.optional else ''} {tensor.data_type} ({axes})"


def _vector_rows(text: str, vectors: FloatArray) -> list[tuple[str, ...]]:
    """One row per token: its word, where the words are as many as the rows, or else its number."""
    words = text.split()
    labels = words if len(words) == len(vectors) else [str(index) for index in range(len(vectors))]
    more = ("...",) if vectors.shape[1] > _SHOWN_ELEMENTS else ()
    numbers = ([f"{number: .4f}" for number in row[:_SHOWN_ELEMENTS]] for row in vectors)
    return [("  " + label, *row, *more) for label, row in zip(labels, numbers, strict=True)]


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
