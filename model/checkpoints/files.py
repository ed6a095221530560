"""Files of named tensors: their names and shapes, and one tensor at a time.

A safetensors file is opened lazily. A file of torch.save is mapped into memory if its format allows it, and
read with `weights_only`: a pickle with anything but tensors and plain containers is refused.
"""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attention_serving.model.checkpoints.errors import CheckpointError

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TensorFile(Protocol):
    """Named tensors of any shape."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the file."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def read(self, name: str) -> Tensor:
        """The tensor as float32."""


@contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """Opens a .safetensors file, or a .pt, .pth or .bin file written by torch.save.

    Raises:
        CheckpointError: The file has another suffix, cannot be read, or holds more than tensors.
    """
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"the file's name must end in one of {', '.join(SUFFIXES)}")
    if path.suffix != ".safetensors":
        yield _PickledFile(_unpickle(path))
        return
    try:
        handle = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read as safetensors: {error}") from error
    with handle as opened:
        yield SafetensorsFile(opened)


class SafetensorsFile:
    """A safetensors file. Only the requested tensors are read."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.names: tuple[str, ...] = tuple(handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handle.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor as float32."""
        try:
            tensor: Tensor = self._handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name}: cannot be read: {error}") from error
        return _as_float32(name, tensor)


class _PickledFile:
    """Tensors by name; nested ones, as in {"state_dict": {...}}, by path: state_dict.NAME."""

    def __init__(self, contents: Mapping[Any, Any]) -> None:
        self._values: dict[str, Any] = {}
        for name, value in contents.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            self._values |= {f"{name}.{key}": held for key, held in inner} if inner else {str(name): value}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def read(self, name: str) -> Tensor:
        return _as_float32(name, self._tensor(name).detach())

    def _tensor(self, name: str) -> Tensor:
        value = self._values[name]
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name}: holds {type(value).__name__}, not a tensor")
        return value


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


def _as_float32(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _FLOATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        found = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: has elements of type {found}, expected one of {known}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{name}: is {tensor.layout} on {tensor.device}, expected a dense tensor")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise CheckpointError(f"{name}: repeats fewer elements than its shape {tuple(tensor.shape)} has")
    return tensor.to(torch.float32)
