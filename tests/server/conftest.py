"""Fixtures of the server's tests: the models that the small artifacts load to, and threads of codecs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run import session
from attention_serving.server.engine.run.memory import SlabPool
from attention_serving.server.engine.run.provider import Device
from tests.server.samples import CROSS, SELF, TEXT, load_repository


@pytest.fixture(scope="session")
def loaded(artifacts: Path) -> Repository:
    return load_repository(artifacts, Device(threads=1))


@pytest.fixture(scope="session")
def self_model(loaded: Repository) -> LoadedModel:
    return loaded.ready(SELF)


@pytest.fixture(scope="session")
def cross_model(loaded: Repository) -> LoadedModel:
    return loaded.ready(CROSS)


@pytest.fixture(scope="session")
def text_model(loaded: Repository) -> LoadedModel:
    return loaded.ready(TEXT)


@pytest.fixture(scope="session")
def models(loaded: Repository) -> dict[str, LoadedModel]:
    return {model.name: model for model in loaded if isinstance(model, LoadedModel)}


@pytest.fixture(scope="session")
def slabs() -> SlabPool:
    """The memory of `bound_models`: arrays of any size get a slab, and there is not enough for all."""
    return SlabPool(256 << 10, least_bytes=1)


@pytest.fixture(scope="session")
def bound_models(artifacts: Path, slabs: SlabPool) -> dict[str, LoadedModel]:
    """The same models with bound runs, as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "slab_pool", lambda _: slabs)
        bound = load_repository(artifacts, Device(threads=1, binds=True))
    return {model.name: model for model in bound if isinstance(model, LoadedModel)}


@pytest.fixture
def threads() -> Iterator[CodecThreads]:
    threads = CodecThreads()
    yield threads
    threads.close()
