"""Random modules: an answer equals that of eager PyTorch for each sequence alone, or is refused.

tests/support/random_modules.py makes them. `RANDOM_MODULES=320` tries so many from the seed
`RANDOM_MODULES_SEED` (0); with 1 and the number of a module, that module alone. What was refused or limited,
and what failed, is appended to build/random-modules.txt.
"""

import math
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from attention_serving.artifact.errors import ArtifactError
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.types import DecodedRequest, Mask, MaskKind, Ragged
from scripts.local_server import ROOT
from tests.server.seams import SAME_FOR_ALL, costing, engine_of, outcome
from tests.support.eager import ATOL, RTOL, Array
from tests.support.random_modules import RandomModule

pytestmark = pytest.mark.thorough
# Modules that are exported and served at once, and which are tried. The usual 40 have a branch on a length
# and on values, padding that matters far away, an axis between the first input's and the last's, values whose
# logarithm exists, and a mask of query and key rows beside four axes.
ROUND, USUAL = 40, (*range(170, 207), 2, 297, 842)
COUNT, FIRST = os.environ.get("RANDOM_MODULES"), int(os.environ.get("RANDOM_MODULES_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(COUNT)) if COUNT else USUAL
EXPORTERS, CALLERS = 2, 8
REPORT = ROOT / "build/random-modules.txt"
# Rounding may differ by so many times as much as that of eager PyTorch in float32, and for each row that is
# summed by a part of the largest value.
ROUNDING, ROW_ROUNDING = 30, 6e-8
# The largest part of the modules without a trait that may be refused, such as for large scores.
REFUSED_PART = 0.05
Sequences = Sequence[dict[str, Array]]
# Takes the name of a model; returns the arrays of each output.
Send = Callable[[str, Sequences], list[list[Array]]]


@dataclass
class Findings:
    """What became of the modules: messages and counts by name."""

    refused: dict[str, str] = field(default_factory=dict)
    limited: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    answers: int = 0

    def write(self, modules: Sequence[RandomModule]) -> str:
        lines = [
            f"{len(modules)} modules from seed {modules[0].seed}: {len(self.refused)} refused, "
            f"{len(self.limited)} limited, {self.answers} right answers, {len(self.failed)} failed"
        ]
        verdicts = (self.refused, self.limited, self.failed)
        lines += [f"{v[m.name]}\n  {m}" for m in modules for v in verdicts if m.name in v]
        REPORT.parent.mkdir(exist_ok=True)
        with REPORT.open("a") as file:
            file.write("\n".join(lines) + "\n")
        return lines[0]


def export(seed: int, folder: Path) -> str:
    """Exports the module of a seed; returns why it is refused, or nothing."""
    try:
        RandomModule(seed).export(folder)
    except ValueError as refusal:  # which is what an ExportError is
        return str(refusal).partition("\n")[0]
    return ""


def compute(network: nn.Module, module: RandomModule, sequence: Mapping[str, Array]) -> list[list[Array]]:
    """Outputs of eager PyTorch for one sequence alone, in float32 and in float64.

    The second uses no fused kernels, which differ in what NaN of an input spreads to.
    """
    sizes = {axis: len(sequence[name]) for name, (_, axis) in module.inputs.items()}
    tensors = module.tensors({name: sequence[name][None] for name in (*module.inputs, *module.fixed)})
    for mask in module.masks:
        allowed = torch.ones([sizes[axis] for axis in mask.axes], dtype=torch.bool)
        if len(mask.axes) > 1 and "attention_mask" in sequence:
            allowed = torch.from_numpy(sequence["attention_mask"])
        tensors[mask.name] = mask.encode(allowed)
    results = []
    for dtype, kernel in ((torch.float64, sdpa_kernel(SDPBackend.MATH)), (torch.float32, nullcontext())):
        torch.set_default_dtype(dtype)
        torch.backends.mha.set_fastpath_enabled(dtype is torch.float32)
        with torch.inference_mode(), kernel:
            cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
            outputs = network.to(dtype)(**cast)
        leaves = (leaf for leaf in tree_leaves(outputs) if leaf is not None)
        results.append([leaf.select(module.batch_axis(leaf), 0).numpy() for leaf in leaves])
    return results[::-1]


def difference(rows: int, answer: Array, expected: Array, exact: Array) -> float:
    """Largest |answer - eager| if that exceeds the tolerance and what rounding explains, otherwise 0."""
    if answer.shape != expected.shape:
        return math.inf
    answer, expected, exact = (array.astype(float) for array in (answer, expected, exact))
    same = np.isnan(answer) & (np.isnan(expected) | np.isnan(exact))
    expected = np.where(np.isnan(expected), exact, expected)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same | (answer == expected), 0, np.abs(answer - expected))
        rounding = np.nan_to_num(np.abs(expected - exact), nan=0, posinf=0).max(initial=0)
    summed = ROW_ROUNDING * rows * np.abs(expected[np.isfinite(expected)]).max(initial=0)
    errors[errors <= ATOL + RTOL * np.abs(expected) + ROUNDING * rounding + summed] = 0
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0))


def send_to_engine(
    engine: Engine, models: Mapping[str, LoadedModel], name: str, sequences: Sequences
) -> list[list[Array]]:
    """Answers of the engine in this process, which runs as many sequences together as it may."""
    arrays = {key: [np.atleast_1d(sequence[key]) for sequence in sequences] for key in sequences[0]}
    mask, flags = None, arrays.pop("attention_mask", None)
    if flags is not None:
        mask = Mask(MaskKind.PAIRS, np.concatenate([array.ravel() for array in flags]))
    inputs = {key: Ragged(np.concatenate(rows), tuple(map(len, rows))) for key, rows in arrays.items()}
    request = validate(DecodedRequest(inputs=inputs, mask=mask), models[name], Limits())
    engine.submit(request)
    return list(outcome(request).outputs.values())


def answer(send: Send, name: str, sequences: Sequences) -> Iterator[list[Array] | str]:
    """The outputs of each sequence, or why it is refused: those of a refused list are sent one by one."""
    try:
        outputs = send(name, sequences)
    except EngineError as error:
        if error.code == Code.INVALID_ARGUMENT and len(sequences) > 1:
            for sequence in sequences:
                yield from answer(send, name, [sequence])
        else:
            yield from [f"{error.code.name} {error.reason}: {error}"] * len(sequences)
    else:
        yield from map(list, zip(*outputs, strict=True))


def compare(
    module: RandomModule, network: nn.Module, sequence: dict[str, Array], outputs: list[Array] | str
) -> str:
    """What is wrong with an answer; nothing if it is right."""
    if isinstance(outputs, str):
        return outputs
    rows = repeat(max(len(sequence[name]) for name in module.inputs))
    error = max(map(difference, rows, outputs, *compute(network, module, sequence)))
    return f"off by {error:.3g}" if error else ""


def judge(module: RandomModule, folder: Path, send: Send, findings: Findings) -> None:
    """Sends all requests of many callers at once, and compares each answer with eager PyTorch."""
    network, requests = module.build(folder), list(module.requests())
    with ThreadPoolExecutor(CALLERS) as callers:
        calls = [
            callers.submit(lambda *call: list(answer(*call)), send, module.name, job) for job in requests
        ]
    for sequences, call in zip(requests, calls, strict=True):
        lengths = [[len(sequence[name]) for name in module.inputs] for sequence in sequences]
        for at, (sequence, outputs) in enumerate(zip(sequences, call.result(), strict=True)):
            if isinstance(outputs, str) and outputs.startswith(Code.INVALID_ARGUMENT):
                findings.limited[module.name] += 1
            elif problem := compare(module, network, sequence, outputs):
                findings.failed.setdefault(module.name, f"{problem}, sequence {at} of lengths {lengths}")
            else:
                findings.answers += 1


def serve(modules: Sequence[RandomModule], folder: Path, findings: Findings) -> None:
    """Serves what was exported by an engine in this process, and judges the answers."""
    repository, device = folder / "repository", Device(Provider.CPU, threads=1)
    models = dict[str, LoadedModel]()
    for version in repository.glob("*/1"):
        name = version.parent.name
        try:
            models[name] = costing(load_model(version, device), SAME_FOR_ALL)
        except ArtifactError as error:
            findings.failed[name] = f"load: {error}"
            shutil.rmtree(version.parent)
    if not models:
        return
    engine = engine_of(parallel_runs=1)
    send = partial(send_to_engine, engine, models)
    for module in (module for module in modules if module.name in models):
        judge(module, folder, send, findings)
    engine.close()


@pytest.mark.parametrize(
    "seeds", [SEEDS[at : at + ROUND] for at in range(0, len(SEEDS), ROUND)], ids=lambda seeds: str(seeds[0])
)
def test_no_answer_is_wrong(seeds: Sequence[int], tmp_path: Path) -> None:
    modules = [RandomModule(seed) for seed in seeds]
    findings, spawning = Findings(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(EXPORTERS, spawning, torch.set_num_threads, (1,)) as pool:
        exports = {module.name: pool.submit(export, module.seed, tmp_path) for module in modules}
    for name, job in exports.items():
        if error := job.exception():
            findings.failed[name] = f"export: {error!r}"
        elif message := job.result():
            findings.refused[name] = message
    serve(modules, tmp_path, findings)
    summary = findings.write(modules)
    failed = [f"{findings.failed[m.name]}\n  {m}" for m in modules if m.name in findings.failed]
    assert not failed, "\n".join([summary, *failed])
    plain = [module for module in modules if not module.traits]
    refused = [findings.refused[module.name] for module in plain if module.name in findings.refused]
    assert len(refused) <= math.ceil(REFUSED_PART * len(plain)), "\n".join([summary, *refused])
    hostile = [module for module in modules if module.traits & {"guard", "value", "state"}]
    answered = [
        str(module) for module in hostile if module.name not in {*findings.refused, *findings.limited}
    ]
    assert not answered, "\n".join([summary, *answered])
