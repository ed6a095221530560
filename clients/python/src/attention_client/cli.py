"""The command line: changes with its commands and their options.

Exit codes: 0 done, 1 no result (one line on stderr says why), 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from attention_client._client import AttentionClient
from attention_client._connection import DEFAULT_TARGET, DEFAULT_TIMEOUT
from attention_client._printing import description, models_table, vectors_table, weights_table, word_labels
from attention_client._values import Array
from attention_client.errors import AttentionClientError, invalid


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

    describe = commands.add_parser("describe", help="print all that the server says of a model")
    describe.add_argument("--model", required=True, metavar="NAME")
    describe.add_argument("--version", default="", metavar="V", help="default: the highest")
    describe.set_defaults(run=_describe)

    text = commands.add_parser("text", help="print the context vectors of texts")
    text.add_argument("--model", required=True, metavar="NAME")
    text.add_argument("texts", nargs="+", metavar="TEXT")
    text.set_defaults(run=_text)

    weights = commands.add_parser("weights", help="print or draw the attention weights of a text")
    weights.add_argument("--model", required=True, metavar="NAME")
    weights.add_argument("--text", required=True, metavar="TEXT")
    weights.add_argument("--head", type=int, metavar="N", help="that head only, from 0; default: all")
    weights.add_argument("--plot", type=Path, metavar="FILE", help="draw heat maps too; needs the extra plot")
    weights.set_defaults(run=_weights)

    attend = commands.add_parser("attend", help="compute the context vectors of arrays in .npy files")
    attend.add_argument("--model", required=True, metavar="NAME")
    attend.add_argument("--query", required=True, type=Path, metavar="FILE", help="(T, d) or (..., T, d)")
    attend.add_argument("--key", type=Path, metavar="FILE")
    attend.add_argument("--value", type=Path, metavar="FILE")
    attend.add_argument("--out", required=True, type=Path, metavar="FILE")
    attend.set_defaults(run=_attend)
    return parser


def _models(client: AttentionClient, _: argparse.Namespace) -> None:
    sys.stdout.write(models_table(client.models()))


def _describe(client: AttentionClient, options: argparse.Namespace) -> None:
    sys.stdout.write(description(client.model(options.model, options.version)))


def _text(client: AttentionClient, options: argparse.Namespace) -> None:
    result = client.attend_text(options.model, options.texts)
    for text, vectors in zip(options.texts, result.context_vectors, strict=True):
        sys.stdout.write(f"{text}  {vectors.shape}, {result.model_name} {result.model_version}\n")
        sys.stdout.write(vectors_table(word_labels(text, len(vectors)), vectors))


def _weights(client: AttentionClient, options: argparse.Namespace) -> None:
    heat_maps = None if options.plot is None else _heat_maps()  # before the server is asked in vain
    result = client.attend_text(options.model, options.text, return_weights=True)
    weights = result.attention_weights
    if weights is None:
        raise ValueError(f"{result.model_name} answered no attention weights")
    heads, labels = _heads(options.head, len(weights)), word_labels(options.text, weights.shape[-1])
    title = f"{result.model_name}, version {result.model_version}"
    if heat_maps is not None:
        maps = heat_maps.HeatMaps(weights=weights[heads], heads=heads, labels=labels, title=title)
        heat_maps.save(maps, options.plot)
    sys.stdout.write(f"{options.text}  {weights.shape}, {title}; rows are queries, columns keys\n")
    for head in heads:
        sys.stdout.write(f"\nhead {head}\n{weights_table(labels, weights[head])}")


def _heads(chosen: int | None, count: int) -> list[int]:
    if chosen is None:
        return list(range(count))
    if not 0 <= chosen < count:
        raise invalid("--head", f"0 to {count - 1}", chosen)
    return [chosen]


def _heat_maps() -> ModuleType:
    try:
        return import_module("attention_client._heat_maps")
    except ModuleNotFoundError as error:
        message = "--plot needs matplotlib: pip install matplotlib"
        raise ValueError(message) from error


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
