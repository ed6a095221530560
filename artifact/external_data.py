"""The files that an ONNX graph names, read from its bytes: ONNX Runtime would open them without a question.

A tensor of a graph may lie in another file, which the graph names by its location. The graph's bytes are
walked without the onnx package, which the server lacks, and without copying tensors. Everything that is not
on the way to a tensor is skipped. Fields are those of onnx.proto: a test compares them with the package.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.protobuf_fields import LENGTH_DELIMITED, message_fields

LOCATION = b"location"
MODEL, ENTRY = "ModelProto", "StringStringEntryProto"
# By message of onnx.proto, its fields that lead to tensors: the message of each by number.
FIELDS: Final[Mapping[str, Mapping[int, str]]] = {
    MODEL: {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: ENTRY},  # external_data
}
ENTRY_KEY, ENTRY_VALUE = 1, 2


def external_locations(path: Path) -> frozenset[str]:
    """Every location of external data that an ONNX file names, as it is written there.

    Raises:
        ArtifactError: The file cannot be read, or is not a protobuf message.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:  # which cannot be mapped
                return frozenset()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(_locations(data))
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(path, f"is not an ONNX graph: {error}") from error


def _locations(data: mmap.mmap) -> Iterator[str]:
    """Walks the messages without recursion, whatever their depth."""
    pending = [(MODEL, 0, len(data))]
    while pending:
        message, begin, end = pending.pop()
        if message == ENTRY:
            yield from _entry_locations(data, begin, end)
            continue
        for number, wire_type, _, start, stop in message_fields(data, begin, end):
            if wire_type == LENGTH_DELIMITED and (child := FIELDS[message].get(number)):
                pending.append((child, start, stop))


def _entry_locations(data: mmap.mmap, begin: int, end: int) -> Iterator[str]:
    """Each value of an entry that has the key, also if a damaged entry repeats one of its fields."""
    fields: Mapping[int, list[bytes]] = {ENTRY_KEY: [], ENTRY_VALUE: []}
    for number, wire_type, _, start, stop in message_fields(data, begin, end):
        if wire_type == LENGTH_DELIMITED and number in fields:
            fields[number].append(data[start:stop])
    if LOCATION in fields[ENTRY_KEY]:
        for value in fields[ENTRY_VALUE] or [b""]:
            yield value.decode("utf-8", "backslashreplace")
