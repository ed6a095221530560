"""Writes the graphs of a model, which share one file of weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data

WEIGHTS_FILE = "weights.bin"
# Weights of at least this size in total are stored in one file that the graphs share.
EXTERNAL_BYTES = 1 << 20
# Smaller tensors stay in the graph: shapes and scalars, which the runtime folds.
EXTERNAL_TENSOR_BYTES = 1 << 10
# Page size, because the file is mapped into memory.
ALIGNMENT = 4096


def write_graphs(graphs: Mapping[str, onnx.ModelProto], folder: Path) -> None:
    """Writes graphs by file name, and each distinct tensor once. Modifies the graphs."""
    tensors = {
        _digest(tensor): tensor.raw_data
        for graph in graphs.values()
        for tensor in graph.graph.initializer
        if len(tensor.raw_data) >= EXTERNAL_TENSOR_BYTES
    }
    if sum(map(len, tensors.values())) >= EXTERNAL_BYTES:
        offsets = _write_weights(tensors, folder / WEIGHTS_FILE)
        for graph in graphs.values():
            _refer_to_weights(graph, offsets)
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph.SerializeToString(deterministic=True))
        onnx.checker.check_model(folder / name)


def _write_weights(tensors: Mapping[str, bytes], path: Path) -> dict[str, int]:
    """Writes each distinct tensor once. Returns the offsets by hash."""
    offsets = {}
    with path.open("wb") as file:
        for digest, data in tensors.items():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offsets[digest] = file.tell()
            file.write(data)
    return offsets


def _refer_to_weights(graph: onnx.ModelProto, offsets: Mapping[str, int]) -> None:
    for tensor in graph.graph.initializer:
        offset = offsets.get(_digest(tensor))
        if offset is not None:
            set_external_data(tensor, WEIGHTS_FILE, offset=offset, length=len(tensor.raw_data))
            tensor.ClearField("raw_data")


def _digest(tensor: onnx.TensorProto) -> str:
    return hashlib.sha256(tensor.raw_data).hexdigest()
