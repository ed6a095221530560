"""Damages an artifact in one of many ways, as decided by a generator of random numbers."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx

MANIFEST = "manifest.json"
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 255, 2**31, 2**63, 10**400, -1.5, 1e-300, 1e308, "", "x", "x" * 10_000,
    "../../x", "/etc/passwd", "a/b", "..", "a\x00b", "\ud7ff", "*/_ORT_MEM_ADDR_/*", [], {}, [[]],
    ["batch"] * 1000,
)  # fmt: skip
OPERATORS = ("MatMul", "Reshape", "Loop", "If", "Gather", "Expand", "Attention", "ConstantOfShape", "Absent")
# Writes the damage into the folder; returns whether it is one that the manifest's hashes may vouch for.
Mutation = Callable[[Path, Random], bool]


def mutate(folder: Path, rng: Random) -> tuple[str, bool]:
    """Damages the artifact of a folder. Returns what was done, and whether the manifest vouches for it."""
    mutation = rng.choice(MUTATIONS)
    vouch = mutation(folder, rng) and rng.random() < 0.7
    if vouch:
        rehash(folder)
    return mutation.__name__, vouch


def rehash(folder: Path) -> None:
    """Makes the manifest vouch for all listed files as they now are."""
    content = json.loads((folder / MANIFEST).read_text())
    for name in content["files"]:
        path = folder / name
        if path.is_file():
            content["files"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content))


def _file(folder: Path, rng: Random, pattern: str = "*") -> Path:
    return rng.choice(sorted(path for path in folder.glob(pattern) if path.name != MANIFEST))


def flip_bits(folder: Path, rng: Random) -> bool:
    """Of any file, a graph, the head of the golden vectors, or the manifest."""
    path = _file(folder, rng, rng.choice(("*", "*.onnx", "golden*")))
    path = rng.choice((path, path, path, folder / MANIFEST))
    content = bytearray(path.read_bytes())
    end = min(2000, len(content)) if path.name.startswith("golden") else len(content)
    for _ in range(rng.choice((1, 1, 4, 64))):
        content[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return path.name != MANIFEST


def truncate(folder: Path, rng: Random) -> bool:
    path = rng.choice((_file(folder, rng), folder / MANIFEST))
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name != MANIFEST


def replace_a_file_with_something_else(folder: Path, rng: Random) -> bool:
    path = _file(folder, rng)
    path.unlink()
    match rng.choice(("nothing", "folder", "pipe", "link")):
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(rng.choice(("/etc/hostname", "/dev/zero", "..", path.name, "absent", MANIFEST)))
    return False


def edit_the_manifest(folder: Path, rng: Random) -> bool:
    content = json.loads((folder / MANIFEST).read_text())
    for _ in range(rng.choice((1, 1, 2))):
        _edit(content, rng)
    (folder / MANIFEST).write_text(json.dumps(content))
    return False


def _edit(values: Any, rng: Random) -> None:
    """Changes one value somewhere in a tree."""
    while True:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(values[key], (dict, list)) or not values[key] or rng.random() < 0.15:
            break
        values = values[key]
    match rng.randrange(4):
        case 0:
            del values[key]
        case 1 if isinstance(values, dict):
            values[str(rng.choice(HOSTILE))[:100]] = values[key]
        case _:
            values[key] = rng.choice(HOSTILE)


def edit_a_graph(folder: Path, rng: Random) -> bool:
    path = _file(folder, rng, "*.onnx")
    model = onnx.load(path)
    rng.choice((_edit_tensor, _edit_node, _edit_wiring))(model, rng)
    path.write_bytes(model.SerializeToString())
    return True


def _edit_tensor(model: onnx.ModelProto, rng: Random) -> None:
    tensor = rng.choice(model.graph.initializer)
    match rng.randrange(4):
        case 0:
            tensor.dims.append(rng.choice((0, 1, 2, -1, 2**31, 2**62)))
        case 1 if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice((0, 1, -1, 7, 2**31, 2**40, 2**62))
        case 2:
            tensor.data_type = rng.randrange(30)
        case _:
            tensor.external_data.add(
                key="location", value=rng.choice(("model.onnx", "../x", "/etc/hostname"))
            )
            tensor.external_data.add(key="offset", value=rng.choice(("0", "-1", str(2**63))))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")


def _edit_node(model: onnx.ModelProto, rng: Random) -> None:
    node = rng.choice(model.graph.node)
    if rng.random() < 0.3 or not node.attribute:
        node.op_type = rng.choice(OPERATORS)
        return
    attribute = rng.choice(node.attribute)
    value = rng.choice((0, -1, 1, 3, 2**31, -(2**63), 2**63 - 1))
    if attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = value
    else:
        attribute.i = value


def _edit_wiring(model: onnx.ModelProto, rng: Random) -> None:
    nodes = model.graph.node
    match rng.randrange(4):
        case 0:
            del nodes[rng.randrange(len(nodes))]
        case 1:
            nodes.add().CopyFrom(rng.choice(nodes))
        case 2:
            source = rng.choice([node for node in nodes if node.input])
            source.input[0] = rng.choice([output for node in nodes for output in node.output])
        case _:
            shape = rng.choice([*model.graph.input, *model.graph.output]).type.tensor_type.shape
            if shape.dim:
                rng.choice(shape.dim).dim_value = rng.choice((0, -1, 5, 2**40))


def nest_branches(folder: Path, rng: Random) -> bool:
    """A graph within a graph within a graph, deeper than parsers follow."""
    path = _file(folder, rng, "*.onnx")
    inner = b"\x0a\x02\x0a\x00"
    for _ in range(rng.choice((10, 90, 110, 2000))):
        attribute = _field(6, inner)
        inner = _field(1, _field(5, attribute))
    with path.open("ab") as file:
        file.write(_field(7, inner))
    return True


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    size, encoded = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(encoded) + bytes([size]) + content


# Edits are more frequent than others, for they have the most to break.
MUTATIONS: tuple[Mutation, ...] = (
    *(flip_bits, edit_the_manifest, edit_a_graph) * 3,
    truncate,
    replace_a_file_with_something_else,
    nest_branches,
)
