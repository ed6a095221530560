"""Loads mutated artifacts in a row, as a server does, and asks a good model and those that load in between.

Run as `python -m tests.artifact.load_mutated REPOSITORY FOLDER COUNT`. It writes a line of JSON before
and after each artifact. It is a process of its own: the runtime may crash on a graph that a manifest
vouches for.
"""

import json
import logging
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Ragged, Request
from tests.artifact.mutations import mutate
from tests.server.samples import load_repository
from tests.support.coroutines import submitted

SELF, CROSS, TEXT = "tiny-self", "tiny-cross", "sentence-self-attention"
DEVICE = Device(threads=1)
MAX_ADDRESS_SPACE = 8 << 30
MAX_WIDTH = 4096
PATIENCE_SECONDS = 60


def main(source: Path, folder: Path, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    logging.disable()
    good = load_repository(source, DEVICE).ready(CROSS)
    engine = Engine(Repository([good]))
    expected = answer(engine, good)
    assert isinstance(expected, bytes)
    for number in range(count):
        rng = Random(number)  # noqa: S311 - seeded, so that a case can be run again
        name = rng.choice((SELF, SELF, TEXT))
        repository = folder / str(number)
        shutil.copytree(source / name, repository / name)
        mutation, vouched = mutate(repository / name / "1", rng)
        say(number=number, mutation=mutation, vouched=vouched)
        started = time.monotonic()
        (model,) = load_repository(repository, DEVICE)
        if isinstance(model, FailedModel):
            outcome = f"refused: {model.reason}"
        else:
            outcome = "ready"
            engine.close()
            engine = Engine(Repository([good, model]))
            asked = answer(engine, model)
            outcome = f"ready: {asked if isinstance(asked, str) else 'answers'}"
        say(
            outcome=outcome,
            seconds=time.monotonic() - started,
            good=answer(engine, good) == expected,
            resident=resident_bytes(),
            leaks=str(folder) in outcome,
        )
        shutil.rmtree(repository)
    engine.close()


def answer(engine: Engine, model: LoadedModel) -> bytes | str:
    """The bytes of the answer to a request of each kind, or the reason of a refusal."""
    try:
        futures = [submitted(engine, model, request) for request in requests(model)]
        outputs = [future.result(PATIENCE_SECONDS).outputs for future in futures]
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
        rows: Any
        if spec.data_type == "int64":
            rows = rng.integers(0, spec.exclusive_upper_bound or 1, 5)
        else:
            rows = rng.standard_normal((5, *sizes), dtype=np.float32)
        inputs[spec.name] = Ragged(rows, (2, 3))
    for return_weights in (False, True):
        yield Request(inputs=inputs, return_weights=return_weights)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
