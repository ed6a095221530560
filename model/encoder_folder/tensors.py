"""The weights of a folder: one file, or several with an index."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from attention_serving.model.checkpoints.errors import CheckpointError
from attention_serving.model.checkpoints.files import TensorFile, open_file
from attention_serving.model.encoder_folder.fields import read_json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


class FolderTensors:
    """Named tensors of one or several files."""

    def __init__(self, files: Mapping[str, TensorFile]) -> None:
        """Takes the file of each name."""
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._files[name].shape(name)

    def read(self, name: str) -> Tensor:
        """The tensor as float32."""
        return self._files[name].read(name)


@contextmanager
def open_tensors(folder: Path) -> Iterator[FolderTensors]:
    """Opens model.safetensors, the files of model.safetensors.index.json, or pytorch_model.bin.

    Raises:
        CheckpointError: None of them exists, one cannot be read, or the index does not fit its files.
    """
    with ExitStack() as stack:
        if (folder / INDEX).exists() and not (folder / WHOLE).exists():
            yield FolderTensors(_sharded(folder, stack))
            return
        path = folder / (WHOLE if (folder / WHOLE).exists() else PICKLED)
        if not path.exists():
            raise CheckpointError(f"the folder has neither {WHOLE}, {INDEX} nor {PICKLED}")
        file = stack.enter_context(open_file(path))
        yield FolderTensors(dict.fromkeys(file.names, file))


def _sharded(folder: Path, stack: ExitStack) -> dict[str, TensorFile]:
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
    for tensor, name in places.items():
        if tensor not in opened[name].names:
            raise CheckpointError(f"{name}: {tensor} is missing, which {INDEX} says is there")
    beside = sorted(name for file in opened.values() for name in file.names if name not in places)
    if beside:
        raise CheckpointError(f"{INDEX} does not list {beside[0]}")
    return {tensor: opened[name] for tensor, name in places.items()}
