"""docs/security.md: its tables of methods and errors are those of the code."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.methods import SERVICES, HealthService, all_methods
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security import rights as errors
from attention_serving.server.security.token_file import read_file
from attention_serving.server.settings.sections import IdentityAndRights
from tests.server.samples import ROOT
from tests.server.seams import WatchedEngine

PAGE = (ROOT / "docs/security.md").read_text()
LIMITS_PAGE = (ROOT / "docs/limits.md").read_text()
REASONS = {
    error.reason: str(error.code)
    for error in (
        errors.MissingCredentialsError,
        errors.InvalidTokenError,
        errors.ExpiredTokenError,
        errors.PermissionDeniedError,
        errors.KeysUnavailableError,
        errors.IdentityLimitError,
    )
}


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


@pytest.mark.parametrize(("reason", "status"), REASONS.items())
@pytest.mark.parametrize("page", [PAGE, LIMITS_PAGE], ids=["security", "limits"])
def test_both_pages_state_the_status_of_every_reason(page: str, reason: str, status: str) -> None:
    rows = [line for line in page.splitlines() if f"`{reason}`" in "".join(line.split("|")[1:2])]
    assert len(rows) == 1
    assert f"`{status}`" in rows[0]


@pytest.mark.parametrize("name", IdentityAndRights.model_fields)
def test_every_setting_is_explained(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert flag in PAGE or f"`{name}`" in PAGE
