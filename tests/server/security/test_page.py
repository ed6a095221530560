"""docs/security.md: its table of methods is that of the code."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.methods import SERVICES, HealthService, all_methods
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.token_file import read_file
from attention_serving.server.settings.sections import IdentityAndRights
from tests.server.samples import ROOT
from tests.server.seams import WatchedEngine

PAGE = (ROOT / "docs/security.md").read_text()


@pytest.fixture
def engine(self_model: LoadedModel) -> Iterator[WatchedEngine]:
    engine = WatchedEngine([self_model], Limits())
    yield engine
    engine.close()


def test_the_page_states_the_right_of_every_method(engine: WatchedEngine, threads: CodecThreads) -> None:
    stated: defaultdict[str, set[str]] = defaultdict(set)
    table = PAGE.partition("What each method needs")[2].partition("\n\n")[2].partition("\n\n")[0]
    for right, methods in re.findall(r"^\| `?(\w+)`? \| (`.*`) \|$", table, re.MULTILINE):
        stated[right] |= {name.rpartition("/")[2] for name in re.findall(r"`([^`]+)`", methods)}
    found: defaultdict[str, set[str]] = defaultdict(set)
    methods = all_methods(engine, threads, HealthService(SERVICES), lambda: True, identify=lambda *_: None)
    for path, method in methods.items():
        if not path.startswith("/attention.internal."):
            found[str(method.right or "none")].add(path.rpartition("/")[2])
    assert stated == found


def test_the_file_of_the_page_is_good(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "tokens.toml"
    path.write_text(block)
    assert [entry.name for entry in read_file(path).identities] == ["reports", "jobs"]


@pytest.mark.parametrize("name", IdentityAndRights.model_fields)
def test_every_setting_is_explained(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert flag in PAGE or f"`{name}`" in PAGE
