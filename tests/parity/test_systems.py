"""Every attention system on every path: eager, exported, attention.v1, Open Inference Protocol."""

from collections.abc import Iterator

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.text import TextAttention
from scripts.local_server import serving
from tests.parity import paths
from tests.support.artifacts import cached_repositories
from tests.support.eager import assert_parity
from tests.support.systems import MODELS, SYSTEMS, build

BATCH, QUERY_LENGTH, KEY_LENGTH = 3, 9, 14


def random_case(name: str, *, masked: bool) -> paths.Case:
    """Returns named tensors for one preset; if it takes positions, they do not count from 0."""
    rng = np.random.default_rng(11)
    module, config = build(name), build(name).config
    key_length = KEY_LENGTH if config.cross else QUERY_LENGTH
    if isinstance(module, TextAttention):
        case: paths.Case = {"token_ids": rng.integers(0, 6, (BATCH, QUERY_LENGTH))}
    else:
        case = {"query": rng.standard_normal((BATCH, QUERY_LENGTH, config.d_query), np.float32)}
    if config.cross:
        case["key"] = rng.standard_normal((BATCH, key_length, config.d_key), np.float32)
    if config.separate_value:
        case["value"] = rng.standard_normal((BATCH, key_length, config.d_value), np.float32)
    if config.rotary_theta:
        case["positions"] = rng.integers(0, 500, (BATCH, QUERY_LENGTH))
    mask = rng.random((BATCH, config.num_heads, QUERY_LENGTH, key_length)) < 0.6
    mask[0, :, 2] = False
    return case | {"attention_mask": mask} if masked else case


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[paths.Routes]:
    (repository,) = cached_repositories(MODELS)
    with (
        serving(repository, tmp_path_factory.mktemp("server") / "log") as server,
        AttentionClient(server.target) as client,
    ):
        yield paths.routes(repository, server, client)


@pytest.mark.parametrize("masked", [False, True], ids=["every key", "masked"])
@pytest.mark.parametrize("path", paths.SERVED)
@pytest.mark.parametrize("name", SYSTEMS.values(), ids=SYSTEMS)
def test_equals_eager(routes: paths.Routes, name: str, path: str, masked: bool) -> None:
    case = random_case(name, masked=masked)
    found, expected = routes[path](name, case), paths.eager(build(name), case)
    for output in expected:
        assert_parity(found[output], expected[output])
    if masked:
        assert not found["attention_weights"][0, :, 2].any()
