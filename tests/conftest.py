"""Fixtures that many tests share: exported artifacts and a real server."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_client import AttentionClient

from artifact.tolerance import Tolerance
from export import export_module
from export.artifact import write_artifact
from export.model_id import ModelId
from model.presets import PRESETS, build_preset
from scripts.local_server import ServerProcess, serving
from tests.server.samples import export_samples
from tests.support import modules
from tests.support.tables import GOLDEN_TABLES

# The references are small; threads of PyTorch's beside those of the servers under test only contend.
torch.set_num_threads(1)
# The tables' uniform weights make scores of 100 and more, where fp32 keeps four decimals.
TABLE_TOLERANCE = Tolerance(rtol=1.3e-6, atol=5e-5)
EXPORTERS = 2


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with every preset and every worked example. Tests do not write to it."""
    folder = tmp_path_factory.mktemp("repository")
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(EXPORTERS, spawning, torch.set_num_threads, (1,)) as pool:
        exports = [pool.submit(export_preset, name, folder) for name in PRESETS]
        exports += [pool.submit(export_table, index, folder) for index in range(len(GOLDEN_TABLES))]
        exports += [pool.submit(export_others, folder)]
        for export in exports:
            export.result()
    return folder


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a causal self-attention, a cross-attention and a text model. Tests copy, not write."""
    return export_samples(tmp_path_factory.mktemp("artifacts"))


def export_preset(name: str, folder: Path) -> None:
    write_artifact(build_preset(name), ModelId(name), folder, description=PRESETS[name].description)


def export_table(index: int, folder: Path) -> None:
    table = GOLDEN_TABLES[index]
    what = str(table.case["what"])
    write_artifact(table.module(), ModelId(table.model), folder, description=what, tolerance=TABLE_TOLERANCE)


def export_others(folder: Path) -> None:
    write_artifact(modules.causal_cross(), ModelId(modules.CAUSAL_CROSS), folder)
    for name, preset, precision in modules.LOWERED:
        write_artifact(build_preset(preset), ModelId(name), folder, precision=precision)
    example = (torch.zeros(2, 3, 32),)
    axes = {"src": {0: "batch", 1: "sequence"}}
    export_module(modules.encoder(), example, axes, out=folder, name=modules.ENCODER)


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all those models."""
    with serving(repository, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of that server."""
    with AttentionClient(server.target) as client:
        yield client
