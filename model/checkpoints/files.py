"""Files of named tensors. They are mapped into memory, so that only the tensors that are used are read.

A file of torch.save is read with `weights_only`: a pickle with anything but tensors and plain containers is
refused.
"""

import json
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError, summarise
from attention_serving.model.checkpoints.layouts import Shape

SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin")
# Larger files are not configurations.
MAX_JSON_BYTES: Final = 16 << 20
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NamedTensors = Mapping[str, Tensor]


def open_file(path: Path) -> NamedTensors:
    """Maps a .safetensors file, or a .pt, .pth or .bin file written by torch.save.

    Tensors of a mapping in a file, as in {"state_dict": {...}}, are named by their path: state_dict.NAME.

    Raises:
        CheckpointError: The file has another suffix, cannot be read, or holds objects that can run code.
    """
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"the file's name must end in one of {', '.join(SUFFIXES)}")
    if path.suffix != ".safetensors":
        return dict(_flatten(_unpickle(path)))
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read as safetensors: {error}") from error


def _flatten(contents: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in contents.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value.detach()
        elif isinstance(value, Mapping) and not prefix:
            yield from _flatten(value, f"{name}.")


def _unpickle(path: Path) -> Mapping[Any, Any]:
    """Reads a file written by torch.save. The library raises errors of many types for damaged files."""
    try:
        # Only the zip format, torch.save's default, can be mapped.
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "is damaged, or holds objects other than tensors; such a file is refused because loading it can "
            "run code in the file: save the state_dict() of the module instead of the module"
        ) from error
    except Exception as error:
        raise CheckpointError(f"cannot be read as a file written by torch.save: {error}") from error
    if not isinstance(contents, Mapping):
        raise CheckpointError(f"holds {type(contents).__name__}, not a mapping of names to tensors")
    return contents


def as_float32(name: str, tensor: Tensor) -> Tensor:
    """The elements of a stored tensor as float32.

    Raises:
        CheckpointError: It has elements of another kind, or fewer than its shape has.
    """
    if tensor.dtype not in _FLOATS:
        types = ", ".join(map(str, _FLOATS))
        raise CheckpointError(f"{name}: has elements of type {tensor.dtype}, expected one of {types}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{name}: is {tensor.layout} on {tensor.device}, expected a dense tensor")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise CheckpointError(f"{name}: repeats fewer elements than its shape {tuple(tensor.shape)} has")
    return tensor.to(torch.float32)


def check_tensors(
    tensors: NamedTensors, expected: Mapping[str, Shape], unexpected: Collection[str] = (), *, where: str = ""
) -> None:
    """Compares a file with the names and shapes that it must have.

    Args:
        tensors: Those of the file.
        expected: Shapes by name.
        unexpected: Names of tensors that must not be there: they may change what a module computes.
        where: What the message begins with.

    Raises:
        CheckpointError: The message lists what is missing, unexpected or of another shape, each by name.
    """
    shapes = {name: tuple(tensors[name].shape) for name in expected if name in tensors}
    problems = [f"{name}: missing" for name in expected if name not in shapes]
    problems += [f"{name}: unexpected" for name in sorted(unexpected)]
    for name, shape in shapes.items():
        if shape != expected[name]:
            problems.append(f"{name}: expected shape {expected[name]}, found {shape}")
    if problems:
        raise CheckpointError(where + summarise(problems, separator="; "))


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: The file cannot be read, is too large or is not JSON.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error


def parameter_shapes(make: Callable[[], nn.Module]) -> dict[str, Shape]:
    """Shapes of the parameters of a module, without memory for them: a small file can claim any shape.

    Raises:
        CheckpointError: A tensor would have more elements than can be counted.
    """
    try:
        with torch.device("meta"):
            module = make()
    except RuntimeError as error:
        raise CheckpointError(f"the module would be too large: {error}") from error
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
