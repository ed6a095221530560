"""The source of the page that draws attention weights: its own tests, and the page that is committed."""

import hashlib
import os
import re

import pytest

from scripts.local_server import ROOT
from tests.support import node_package

PACKAGE = ROOT / "clients/explorer"
PAGE = ROOT / "clients/python/src/attention_client/_explorer.html"
MOST_BYTES = 200_000


def run(program: str, *arguments: str) -> node_package.Finished:
    """Runs node or npm in the package."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("EXPLORER_")}
    return node_package.run(PACKAGE, program, *arguments, env=env)


def test_the_page_is_small_and_was_built_from_this_source() -> None:
    names = ["build.mjs", "package.json", "package-lock.json"]
    names += [f"src/{path.name}" for path in (PACKAGE / "src").iterdir()]
    lines = [
        f"{hashlib.sha256((PACKAGE / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(names)
    ]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert PAGE.stat().st_size < MOST_BYTES
    stated = re.search(r'<meta name="source-sha256" content="(\w+)">', PAGE.read_text())
    assert (stated or "")[1] == expected, "run `npm run build` in clients/explorer"


@pytest.mark.thorough
def test_the_tests_of_the_package_pass_and_its_source_builds_the_page() -> None:
    node_package.install(PACKAGE)
    node_package.succeed(run("npm", "test"))
    node_package.succeed(run("npm", "run", "build", "--", "--check"))
