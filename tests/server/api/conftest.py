"""Fixtures of the tests of the gRPC surface."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.security.guard import Guard
from tests.server.api.served import ALIASES, ENTRIES, Secured
from tests.server.seams import Served
from tests.server.security.samples import FixedKeys, issuer_tokens, public_jwk, watched, write_tokens


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.json", *ENTRIES)


@pytest.fixture
def engine(loaded: Repository) -> Iterator[Engine]:
    with closing(Engine(loaded)) as engine:
        yield engine


@pytest.fixture
def guard(tokens_file: Path) -> Iterator[Guard]:
    table = watched(tokens_file)
    yield Guard(table, issuer_tokens(FixedKeys(public_jwk("RS256"))))
    table.close()


@pytest.fixture
def secured(
    self_model: LoadedModel, cross_model: LoadedModel, guard: Guard, tokens_file: Path
) -> Iterator[Secured]:
    with Served(self_model, cross_model, guard=guard, alias=ALIASES) as served:
        yield Secured(served, tokens_file)
