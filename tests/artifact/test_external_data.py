"""The files that a graph names, wherever in the graph."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, TensorProto

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.external_data import ENTRY, FIELDS, external_locations

Place = Callable[[ModelProto], TensorProto]


def branch(graph: GraphProto) -> GraphProto:
    return graph.node.add().attribute.add().g


PLACES: dict[str, Place] = {
    "initializer": lambda model: model.graph.initializer.add(),
    "sparse values": lambda model: model.graph.sparse_initializer.add().values,
    "branch of a branch": lambda model: branch(branch(model.graph)).initializer.add(),
    "function": lambda model: model.functions.add().node.add().attribute.add().t,
}


def locations(model: ModelProto | bytes, folder: Path) -> set[str]:
    path = folder / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return set(external_locations(path))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_file_is_found_wherever_it_is_named(place: Place, tmp_path: Path) -> None:
    model = ModelProto(ir_version=10)
    model.graph.initializer.add(name="w", raw_data=bytes(1000), dims=[250], data_type=TensorProto.FLOAT)
    tensor = place(model)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", "../weights é.bin"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    # It counts even if the tensor does not call itself external.
    model.graph.initializer.add().external_data.add(key="location", value="other")
    assert locations(model, tmp_path) == {"../weights é.bin", "other"}


def described(message: Any, found: dict[str, dict[int, str]]) -> dict[str, dict[int, str]]:
    """The messages within a message, each with the fields that are messages themselves, by number."""
    if message.name not in found:
        inner = [field for field in message.fields if field.message_type is not None]
        found[message.name] = {field.number: field.message_type.name for field in inner}
        for field in inner:
            described(field.message_type, found)
    return found


def test_the_walk_knows_every_way_to_a_tensor() -> None:
    messages = described(ModelProto.DESCRIPTOR, {})
    leading = {"TensorProto"}
    while further := {name for name, fields in messages.items() if leading & set(fields.values())} - leading:
        leading |= further
    ways = {
        name: {number: child for number, child in messages[name].items() if child in leading}
        for name in leading
    }
    assert ways | {"TensorProto": {TensorProto.EXTERNAL_DATA_FIELD_NUMBER: ENTRY}} == FIELDS


DAMAGED = {
    "cut off": (b"\x3a\x05\x0a", "field 7 is cut off"),
    "group": (b"\x3b", "cut off at byte 1"),
    "no field": (b"\x02\x00", "field number 0"),
    "long number": (b"\xff" * 11, "a number longer than 64 bits"),
    "number cut off": (b"\x08\xff", "cut off"),
}


@pytest.mark.parametrize(("data", "says"), DAMAGED.values(), ids=DAMAGED)
def test_bytes_that_are_not_a_graph_are_refused(data: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"is not an ONNX graph: .*{says}"):
        locations(data, tmp_path)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_walked_or_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    with suppress(ArtifactError):
        locations(data, tmp_path_factory.getbasetemp())


def test_an_absent_file_is_refused_and_an_empty_one_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        external_locations(tmp_path / "absent.onnx")
    assert locations(b"", tmp_path) == set()
