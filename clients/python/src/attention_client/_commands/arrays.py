"""Reads the arrays, token ids and texts of a command and writes its results.

An argument is a file (.npy, .npz or JSON), "-" for standard input, or a JSON list. A .npz file holds one
sequence in each of its arrays.
"""

import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import typer

from attention_client._values import Array

Arrays: TypeAlias = Array | list[Any]
STANDARD_INPUT = "-"
_SUFFIXES = (".npy", ".npz", ".json")
_NPY, _ZIP = b"\x93NUMPY", b"PK"


def read_array(option: str, value: str) -> Arrays:
    """The array or the list of arrays that an option names.

    Raises:
        typer.BadParameter: It cannot be read.
    """
    return _checked(option, value, value.encode() if value.startswith("[") else read_bytes(option, value))


def read_token_ids(option: str, value: str) -> Arrays:
    """As `read_array`, or text with the ids of one sequence on each line."""
    data = read_bytes(option, value)
    if data.startswith((_NPY, _ZIP)) or data.lstrip().startswith(b"["):
        return _checked(option, value, data)
    try:
        return [[int(word) for word in line.split()] for line in data.decode().splitlines() if line.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{value}: not lines of integers ({error})", param_hint=option) from error


def read_texts(option: str, value: str) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = read_bytes(option, value).decode().splitlines()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{value}: not UTF-8 text ({error})", param_hint=option) from error
    return [line for line in lines if line.strip()]


def read_bytes(option: str, value: str) -> bytes:
    """The contents of a file, or of standard input for "-"."""
    try:
        return sys.stdin.buffer.read() if value == STANDARD_INPUT else Path(value).read_bytes()
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def array_file(name: str) -> Path:
    """The path that an option names for an output. Its suffix states the format; "-" prints the output.

    Raises:
        typer.BadParameter: The suffix is unknown.
    """
    path = Path(name)
    if path.suffix not in _SUFFIXES and name != STANDARD_INPUT:
        raise typer.BadParameter(f"{path}: expected a name that ends with {', '.join(_SUFFIXES)}")
    return path


def labelled(name: str, arrays: Arrays) -> list[tuple[str, Array]]:
    """The array of an output by its name; those of a list by its name and their index."""
    if not isinstance(arrays, list):
        return [(name, arrays)]
    return [(f"{name}[{index}]", array) for index, array in enumerate(arrays)]


def write(option: str, path: Path, outputs: Arrays | Mapping[str, Arrays]) -> None:
    """Writes an array, a list of them or outputs by their names, in the format of the file's suffix.

    Raises:
        typer.BadParameter: A .npy file is named for several arrays.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(as_lists(outputs)))
        return
    arrays: list[Any] = outputs if isinstance(outputs, list) else [outputs]
    labels: dict[str, Any] = {}
    if isinstance(outputs, Mapping):
        labels = dict(pair for name, output in outputs.items() for pair in labelled(name, output))
        arrays = list(labels.values())
    if path.suffix == ".npz":
        np.savez(path, **labels) if labels else np.savez(path, *arrays)
    elif len(arrays) == 1 and path.suffix == ".npy":
        np.save(path, arrays[0])
    else:
        message = f"{path}: a .npy file holds one array; name a .npz or .json file for the {len(arrays)} here"
        raise typer.BadParameter(message, param_hint=option)


def as_lists(outputs: Any) -> Any:
    """Arrays as nested lists, for JSON."""
    if isinstance(outputs, Mapping):
        return {name: as_lists(output) for name, output in outputs.items()}
    if isinstance(outputs, list):
        return [array.tolist() for array in outputs]
    return None if outputs is None else outputs.tolist()


def _checked(option: str, value: str, data: bytes) -> Arrays:
    try:
        return _parse(data)
    except (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, RecursionError) as error:
        hint = "; write true and false as JSON does" if re.search(rb"\b(True|False)\b", data) else ""
        message = f"{value}: not a .npy, .npz or JSON array ({error}){hint}"
        raise typer.BadParameter(message, param_hint=option) from error


def _parse(data: bytes) -> Arrays:
    if data.startswith(_NPY):
        array: Array = np.load(io.BytesIO(data), allow_pickle=False)
        return array
    if data.startswith(_ZIP):
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return [archive[name] for name in archive.files]
    parsed = json.loads(data)
    if not isinstance(parsed, list):
        raise ValueError(f"expected a list; found {type(parsed).__name__}")  # noqa: TRY004 - the file is wrong
    return parsed
