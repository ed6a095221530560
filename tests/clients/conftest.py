"""Fixtures of the clients' tests: small models, one of which pools, and a server of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_serving.export import export_module
from scripts.local_server import ServerProcess, serving
from tests.clients.named_module import NAMED
from tests.support.artifacts import ModelSet, cached_repositories, link_tree

POOLED, POOLED_WIDTH = "pooled", 6


class MeanOfLinear(nn.Module):
    """A module that returns one vector per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, POOLED_WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """(B, T, 4) to (B, d)."""
        return self.linear(rows).tanh().mean(dim=1)  # type: ignore[no-any-return]


def mean_of_linear() -> MeanOfLinear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MeanOfLinear().eval()


def export_pooled(folder: Path) -> None:
    example, axes = {"rows": torch.zeros(2, 3, 4)}, {"rows": {0: "batch", 1: "length"}}
    export_module(mean_of_linear(), example, axes, out=folder, name=POOLED)


POOLED_MODELS = ModelSet("pooled", [export_pooled], [Path(__file__)], ["enrich_models"])


@pytest.fixture(scope="session")
def named() -> Path:
    """A repository of the module with named inputs and of one with rotary positions."""
    (folder,) = cached_repositories(NAMED)
    return folder


@pytest.fixture(scope="session")
def enrich_models(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the small models and of one whose output is pooled. Tests do not write to it."""
    (pooled,), folder = cached_repositories(POOLED_MODELS), tmp_path_factory.mktemp("enrich")
    for model in (*artifacts.iterdir(), pooled / POOLED):
        link_tree(model, folder / model.name)
    return folder


@pytest.fixture(scope="session")
def sample_server(enrich_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of these models, for all tests that do not stop it."""
    with serving(enrich_models, tmp_path_factory.mktemp("sample-server") / "log") as process:
        yield process


@pytest.fixture(params=["in process", "on a server"])
def backend_options(request: pytest.FixtureRequest, enrich_models: Path) -> dict[str, Any]:
    """The options that choose a backend."""
    if request.param == "in process":
        return {"model_repository": enrich_models}
    server: ServerProcess = request.getfixturevalue("sample_server")
    return {"servers": [server.target]}


@pytest.fixture
def in_process(enrich_models: Path) -> dict[str, Any]:
    """The options of a job in this process."""
    return {"model_repository": enrich_models}
