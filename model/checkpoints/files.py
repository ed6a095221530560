"""Files of named tensors: their names and shapes, and one tensor at a time.

A safetensors file is opened lazily. A file of torch.save is mapped into memory if its format allows it, and
read with `weights_only`: a pickle with anything but tensors and plain containers is refused.
"""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError, listed
from attention_serving.model.checkpoints.layouts import Shape

SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin")
WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
# Larger files are not configurations.
MAX_JSON_BYTES: Final = 16 << 20
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorFile:
    """Named tensors of any shape, in one file or several.

    Attributes:
        names: All names.
        shape: The shape of a tensor, without reading it.
        tensor: A tensor as it is stored.
    """

    names: frozenset[str]
    shape: Callable[[str], Shape]
    tensor: Callable[[str], Tensor]

    def read(self, name: str) -> Tensor:
        """The tensor as float32."""
        return _as_float32(name, self.tensor(name))

    def problems(self, expected: Mapping[str, Shape], unexpected: Mapping[str, str]) -> list[str]:
        """What is missing, what should not be there and why, and what has another shape, each by name."""
        held = self.names & expected.keys()
        shapes = {name: self.shape(name) for name in expected if name in held}
        return [
            *(f"{name}: missing" for name in expected if name not in held),
            *(f"{name}: {reason}" for name, reason in unexpected.items()),
            *(
                f"{name}: expected shape {expected[name]}, found {shape}"
                for name, shape in shapes.items()
                if shape != expected[name]
            ),
        ]


def report(problems: Sequence[str]) -> CheckpointError:
    """The error of several problems."""
    return CheckpointError(listed(problems, separator="; "))


@contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """Opens a .safetensors file, or a .pt, .pth or .bin file written by torch.save.

    Raises:
        CheckpointError: The file has another suffix, cannot be read, or holds more than tensors.
    """
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"the file's name must end in one of {', '.join(SUFFIXES)}")
    if path.suffix != ".safetensors":
        yield _unpickled(path)
        return
    try:
        handle = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read as safetensors: {error}") from error
    with handle as opened:

        def tensor(name: str) -> Tensor:
            try:
                found: Tensor = opened.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(f"{name}: cannot be read: {error}") from error
            return found

        yield TensorFile(
            frozenset(opened.keys()), lambda name: tuple(opened.get_slice(name).get_shape()), tensor
        )


def _unpickled(path: Path) -> TensorFile:
    """Tensors by name; nested ones, as in {"state_dict": {...}}, by path: state_dict.NAME."""
    values: dict[str, Any] = {}
    for name, value in _unpickle(path).items():
        inner = value.items() if isinstance(value, Mapping) else ()
        values |= {f"{name}.{key}": held for key, held in inner} if inner else {str(name): value}

    def tensor(name: str) -> Tensor:
        if not isinstance(values[name], Tensor):
            raise CheckpointError(f"{name}: holds {type(values[name]).__name__}, not a tensor")
        found: Tensor = values[name].detach()
        return found

    return TensorFile(frozenset(values), lambda name: tuple(tensor(name).shape), tensor)


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


@contextmanager
def open_folder(folder: Path) -> Iterator[TensorFile]:
    """Opens model.safetensors, the files of model.safetensors.index.json, or pytorch_model.bin.

    Raises:
        CheckpointError: None of them exists, one cannot be read, or the index does not fit its files.
    """
    with ExitStack() as stack:
        if (folder / INDEX).exists() and not (folder / WHOLE).exists():
            yield _sharded(folder, stack)
            return
        path = folder / (WHOLE if (folder / WHOLE).exists() else PICKLED)
        if not path.exists():
            raise CheckpointError(f"the folder has neither {WHOLE}, {INDEX} nor {PICKLED}")
        yield stack.enter_context(open_file(path))


def _sharded(folder: Path, stack: ExitStack) -> TensorFile:
    index = read_json(folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(f"{INDEX}: weight_map must name the file of each tensor")
    opened: dict[str, TensorFile] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: {name!r} must be a .safetensors file of the folder")
        if not (folder / name).exists():
            raise CheckpointError(f"{INDEX}: {name} is missing")
        opened[name] = stack.enter_context(open_file(folder / name))
    found = {tensor: name for name, file in opened.items() for tensor in file.names}
    if wrong := sorted(tensor for tensor, _ in places.items() ^ found.items()):
        raise CheckpointError(f"{INDEX} does not list what is in its files: {wrong[0]}")
    return TensorFile(
        frozenset(places),
        lambda name: opened[places[name]].shape(name),
        lambda name: opened[places[name]].tensor(name),
    )


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
