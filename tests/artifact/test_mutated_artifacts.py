"""Artifacts that were damaged at random: refused or served, without a crash, growth or harm to others.

Run as `python -m tests.artifact.test_mutated_artifacts REPOSITORY FOLDER COUNT`, this file loads mutated
artifacts in a row, as a server does, and asks a good model and those that load in between. It writes a line
of JSON before and after each artifact. It is a process of its own: the runtime may crash on a graph that a
manifest vouches for.
"""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest

from attention_serving.artifact.manifest import MANIFEST_FILE, file_hash
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request
from scripts.local_server import ROOT
from tests.server.samples import CROSS, SELF, TEXT, load_repository
from tests.support.coroutines import submitted

ARTIFACTS = 100
# How much more memory the process may have in use than after the first tenth of its artifacts.
MAX_GROWTH_BYTES = 64 << 20
# Loading one artifact calibrates it in less than a second; the bound tells that from a hang.
MAX_SECONDS = 60.0
MAX_ADDRESS_SPACE = 8 << 30
MAX_WIDTH = 4096
DEVICE = Device(threads=1)
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 255, 2**31, 2**63, 10**400, -1.5, 1e308, "", "x" * 10_000, "../../x", "/etc/passwd",
    "a\x00b", "\ud7ff", "*/_ORT_MEM_ADDR_/*", [], {}, [[]], ["batch"] * 1000,
)  # fmt: skip
SIZES = (0, -1, 1, 3, 7, 2**31, 2**40, 2**62)


@pytest.mark.thorough
def test_damaged_artifacts_neither_crash_the_process_nor_touch_other_models(
    artifacts: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.artifact.test_mutated_artifacts"]
    command += map(str, (artifacts, tmp_path, ARTIFACTS))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, lines[-1]  # what was announced of the artifact that ended the process
    results = [announced | result for announced, result in zip(lines[::2], lines[1::2], strict=True)]
    assert len(results) == ARTIFACTS
    assert [each for each in results if not each["good"] or each["leaks"]] == []
    assert [each for each in results if each["seconds"] > MAX_SECONDS] == []
    refused = [each for each in results if each["outcome"].startswith("refused")]
    # These break a recorded hash for certain; an edit of the manifest, say, may be harmless.
    broken = [each for each in results if each["mutation"] in ("truncate", "nest_branches")]
    assert any(not each["vouched"] for each in broken)
    assert [each for each in broken if not each["vouched"] and each not in refused] == []
    assert len(refused) > ARTIFACTS // 2
    resident = [each["resident"] for each in results]
    assert max(resident[ARTIFACTS // 10 :]) - max(resident[: ARTIFACTS // 10]) < MAX_GROWTH_BYTES


def main(source: Path, folder: Path, count: int) -> None:
    """Loads mutated artifacts."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    logging.disable()
    good = load_repository(source, DEVICE).ready(CROSS)
    engine = Engine(Repository([good]))
    expected = answer(engine, good)
    assert isinstance(expected, bytes)
    for number in range(count):
        rng = Random(number)  # noqa: S311 - seeded, so that a case can be run again
        name, repository = rng.choice((SELF, SELF, TEXT)), folder / str(number)
        shutil.copytree(source / name, repository / name)
        mutation, vouched = mutate(repository / name / "1", rng)
        say(number=number, mutation=mutation, vouched=vouched)
        started = time.monotonic()
        (model,) = load_repository(repository, DEVICE)
        if isinstance(model, FailedModel):
            outcome = f"refused: {model.reason}"
        else:
            engine.close()
            engine = Engine(Repository([good, model]))
            asked = answer(engine, model)
            outcome = f"ready: {asked if isinstance(asked, str) else 'answers'}"
        say(
            outcome=outcome,
            seconds=time.monotonic() - started,
            good=answer(engine, good) == expected,
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
            leaks=str(folder) in outcome,
        )
        shutil.rmtree(repository)
    engine.close()


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def answer(engine: Engine, model: LoadedModel) -> bytes | str:
    """The bytes of the answer to a request of each kind, or the reason of a refusal."""
    try:
        futures = [submitted(engine, model, request) for request in requests(model)]
        outputs = [future.result(MAX_SECONDS).outputs for future in futures]
    except EngineError as error:
        return error.reason
    return b"".join(array.tobytes() for each in outputs for arrays in each.values() for array in arrays)


def requests(model: LoadedModel) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    for spec in model.inputs:
        sizes = [axis for axis in spec.axes[2:] if isinstance(axis, int)]
        if any(size > MAX_WIDTH for size in sizes):
            return
        rows: Any = rng.standard_normal((5, *sizes), dtype=np.float32)
        if spec.data_type == "int64":
            rows = rng.integers(0, spec.exclusive_upper_bound or 1, 5)
        inputs[spec.name] = Ragged(rows, (2, 3))
    for return_weights in (False, True):
        yield Request(inputs=inputs, return_weights=return_weights)


def mutate(folder: Path, rng: Random) -> tuple[str, bool]:
    """Damages the artifact of a folder. Returns what was done, and whether the manifest vouches for it."""
    mutation = rng.choice(MUTATIONS)
    vouch = mutation(folder, rng) and rng.random() < 0.7
    if vouch:
        content = json.loads((folder / MANIFEST_FILE).read_text())
        content["files"] = {name: file_hash(folder / name) for name in content["files"]}
        (folder / MANIFEST_FILE).write_text(json.dumps(content))
    return mutation.__name__, vouch


def _file(folder: Path, rng: Random, pattern: str = "*") -> Path:
    return rng.choice(sorted(path for path in folder.glob(pattern) if path.name != MANIFEST_FILE))


# Each writes a damage into the folder; returns whether it is one that the manifest's hashes may vouch for.
def flip_bits(folder: Path, rng: Random) -> bool:
    """Of any file, a graph, the head of the golden vectors, or the manifest."""
    path = _file(folder, rng, rng.choice(("*", "*.onnx", "golden*")))
    path = rng.choice((path, path, path, folder / MANIFEST_FILE))
    content = bytearray(path.read_bytes())
    end = min(2000, len(content)) if path.name.startswith("golden") else len(content)
    for _ in range(rng.choice((1, 1, 4, 64))):
        content[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return path.name != MANIFEST_FILE


def truncate(folder: Path, rng: Random) -> bool:
    path = rng.choice((_file(folder, rng), folder / MANIFEST_FILE))
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name != MANIFEST_FILE


def replace_a_file_with_something_else(folder: Path, rng: Random) -> bool:
    path = _file(folder, rng)
    path.unlink()
    match rng.choice(("nothing", "folder", "pipe", "link")):
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            target = rng.choice(("/etc/hostname", "/dev/zero", "..", path.name, "absent", MANIFEST_FILE))
            path.symlink_to(target)
    return False


def edit_the_manifest(folder: Path, rng: Random) -> bool:
    """Removes, renames or changes one value somewhere in the tree."""
    content = json.loads((folder / MANIFEST_FILE).read_text())
    values: Any = content
    while True:
        key = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
        if not isinstance(values[key], dict | list) or not values[key] or rng.random() < 0.15:
            break
        values = values[key]
    match rng.randrange(4):
        case 0:
            del values[key]
        case 1 if isinstance(values, dict):
            values[str(rng.choice(HOSTILE))[:100]] = values[key]
        case _:
            values[key] = rng.choice(HOSTILE)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))
    return False


def edit_a_graph(folder: Path, rng: Random) -> bool:
    path = _file(folder, rng, "*.onnx")
    model = onnx.load(path)
    nodes, node, tensor = model.graph.node, rng.choice(model.graph.node), rng.choice(model.graph.initializer)
    match rng.randrange(8):
        case 0:
            tensor.dims.append(rng.choice(SIZES))
        case 1:
            tensor.data_type = rng.randrange(30)
        case 2:
            location = rng.choice(("model.onnx", "../x", "/etc/hostname"))
            tensor.external_data.add(key="location", value=location)
            tensor.external_data.add(key="offset", value=rng.choice(("0", "-1", str(2**63))))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
        case 3:
            node.op_type = rng.choice(("MatMul", "Reshape", "Loop", "If", "Expand", "Attention", "Absent"))
        case 4 if node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.i = rng.choice(SIZES)
            attribute.ints[:] = [rng.choice(SIZES) for _ in attribute.ints]
        case 5:
            nodes.remove(node)
        case 6 if node.input:
            node.input[0] = rng.choice([output for each in nodes for output in each.output])
        case _:
            shape = rng.choice([*model.graph.input, *model.graph.output]).type.tensor_type.shape
            for dim in shape.dim[-1:]:
                dim.dim_value = rng.choice(SIZES)
    path.write_bytes(model.SerializeToString())
    return True


def nest_branches(folder: Path, rng: Random) -> bool:
    """A graph within a graph within a graph, deeper than parsers follow."""

    def field(number: int, content: bytes) -> bytes:
        return b"".join(protobuf_bytes.field((number,), [content]))

    inner = b"\x0a\x02\x0a\x00"
    for _ in range(rng.choice((10, 90, 110, 2000))):
        inner = field(1, field(5, field(6, inner)))
    with _file(folder, rng, "*.onnx").open("ab") as file:
        file.write(field(7, inner))
    return True


# Edits are more frequent than others, for they have the most to break.
MUTATIONS: tuple[Callable[[Path, Random], bool], ...] = (
    *(flip_bits, edit_the_manifest, edit_a_graph) * 3,
    truncate,
    replace_a_file_with_something_else,
    nest_branches,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
