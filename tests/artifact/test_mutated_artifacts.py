"""Artifacts that were damaged at random: refused or served, without a crash or harm to other models.

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
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest

from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from scripts.local_server import ROOT
from tests.server.samples import CROSS, SELF, load_repository, request_of
from tests.support.artifacts import vouch
from tests.support.coroutines import submitted

ARTIFACTS = 100
MAX_SECONDS = 60.0
MAX_ADDRESS_SPACE = 8 << 30
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
    refused = [each for each in results if each["outcome"].startswith("refused")]
    # A file that was cut breaks its recorded hash for certain; an edit of the manifest, say, may be harmless.
    assert all(each in refused for each in results if each["mutation"] == "truncate" and not each["vouched"])
    assert len(refused) > ARTIFACTS // 2


def main(source: Path, folder: Path, count: int) -> None:
    """Loads mutated artifacts."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    logging.disable()
    good = load_repository(source, DEVICE).ready(CROSS)
    engine = Engine(Repository([good]))
    expected = answer(engine, good)
    for number in range(count):
        rng, repository = Random(number), folder / str(number)  # noqa: S311 - a case can be run again
        shutil.copytree(source / SELF, repository / SELF)
        artifact, mutation = repository / SELF / "1", rng.choice(MUTATIONS)
        vouched = mutation(artifact, rng) and rng.random() < 0.7
        if vouched:
            vouch(artifact, *Manifest.load(artifact).files)
        say(number=number, mutation=mutation.__name__, vouched=vouched)
        (model,) = load_repository(repository, DEVICE)
        if isinstance(model, FailedModel):
            outcome = f"refused: {model.reason}"
        else:
            engine.close()
            engine = Engine(Repository([good, model]))
            outcome = f"ready: {answer(engine, model)}"
        say(outcome=outcome, good=answer(engine, good) == expected, leaks=str(folder) in outcome)
        shutil.rmtree(repository)
    engine.close()


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def answer(engine: Engine, model: LoadedModel) -> str:
    """The results of a request of each kind, or the reason of a refusal."""
    try:
        requests = [request_of(model, ((2, 3), (3, 2)), return_weights=weights) for weights in (False, True)]
        results = [submitted(engine, model, request).result(MAX_SECONDS) for request in requests]
    except EngineError as error:
        return error.reason
    except (KeyError, ValueError):  # inputs that no sample fits
        return "unasked"
    return repr(
        [[array.tobytes() for arrays in each.outputs.values() for array in arrays] for each in results]
    )


# Each writes a damage into the folder; returns whether it is one that the manifest's hashes may vouch for.
def flip_bits(folder: Path, rng: Random) -> bool:
    """Of any file, or of the head of one."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(min(len(data), rng.choice((400, 1 << 30))))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name != MANIFEST_FILE


def truncate(folder: Path, rng: Random) -> bool:
    path = rng.choice(sorted(folder.iterdir()))
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name != MANIFEST_FILE


def edit_the_manifest(folder: Path, rng: Random) -> bool:
    """Removes or changes one value somewhere in the tree."""
    content = json.loads((folder / MANIFEST_FILE).read_text())
    values: Any = content
    while True:
        key = rng.choice(list(values) if isinstance(values, dict) else range(len(values)))
        if not isinstance(values[key], dict | list) or not values[key] or rng.random() < 0.15:
            break
        values = values[key]
    if rng.random() < 0.3:
        del values[key]
    else:
        values[key] = rng.choice(HOSTILE)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))
    return False


def edit_a_graph(folder: Path, rng: Random) -> bool:
    path = rng.choice(sorted(folder.glob("*.onnx")))
    model = onnx.load(path)
    nodes, node, tensor = model.graph.node, rng.choice(model.graph.node), rng.choice(model.graph.initializer)
    match rng.randrange(6):
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
        case 4:
            nodes.remove(node)
        case _:
            shape = rng.choice([*model.graph.input, *model.graph.output]).type.tensor_type.shape
            for dim in shape.dim[-1:]:
                dim.dim_value = rng.choice(SIZES)
    path.write_bytes(model.SerializeToString())
    return True


MUTATIONS: tuple[Callable[[Path, Random], bool], ...] = (flip_bits, edit_the_manifest, edit_a_graph, truncate)

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
