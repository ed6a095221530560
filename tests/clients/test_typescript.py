"""The TypeScript client: its own tests with a live server, the blocks of its README, and its example."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.support import node_package
from tests.support.artifacts import cached_repositories
from tests.support.encoders import WIDTH
from tests.support.node_package import succeed
from tests.support.processes import serving_models
from tests.support.repository import DEMO

pytestmark = pytest.mark.thorough
PACKAGE = ROOT / "clients/typescript"
README_BLOCKS = 4
README = (PACKAGE / "README.md").read_text()
DEFAULT_TARGET = "127.0.0.1:8001"


run = partial(node_package.run, PACKAGE)


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """The compiled package, with the dependencies that its lock file states."""
    node_package.install(PACKAGE)
    succeed(run("npm", "run", "build"))


@pytest.fixture(scope="module")
def server(
    artifacts: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the sample models, of a text encoder, and of those of the package's README."""
    demo, encoders = cached_repositories(DEMO, SENTENCE_MODELS)
    documented = {
        path.name: path for path in [*demo.iterdir(), *repository.iterdir()] if f'"{path.name}"' in README
    }
    models = documented | {path.name: path for path in [*artifacts.iterdir(), encoders / SENTENCE]}
    with serving_models(tmp_path_factory.mktemp("typescript"), models.values()) as process:
        yield process


def test_the_tests_of_the_package_pass_with_a_live_server(server: ServerProcess) -> None:
    finished = run("npm", "test", env={**os.environ, "ATTENTION_TEST_SERVER": server.target})
    succeed(finished)
    assert "skipped 0" in finished.stdout


def test_the_blocks_of_the_readme(server: ServerProcess) -> None:
    """They compile under the package's own rules, and run."""
    folder = PACKAGE / "build/readme"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks = re.findall(r"```ts\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == README_BLOCKS
    for index, block in enumerate(blocks):
        code = block.replace("AttentionClient()", f'AttentionClient("{DEFAULT_TARGET}")')
        (folder / f"block{index}.ts").write_text(code.replace(DEFAULT_TARGET, server.target))
    options = {"rootDir": ".", "outDir": "out", "declaration": False, "sourceMap": False}
    settings = {"extends": "../../tsconfig.json", "compilerOptions": options, "include": ["."]}
    (folder / "tsconfig.json").write_text(json.dumps(settings))
    succeed(run("npm", "exec", "--", "tsc", "-p", "build/readme"))
    printed = [run("node", f"build/readme/out/block{index}.js") for index in range(len(blocks))]
    for process in printed:
        succeed(process)
    assert printed[0].stdout.startswith("6 768\n12 6 6\n")
    assert printed[1].stdout.startswith("2 28\n1 28\n3\n")
    assert printed[2].stdout == "2 28 of 12\n1 28 of 12\n"
    assert printed[3].stdout == "1\n" * 100


def test_the_example(server: ServerProcess, tmp_path: Path) -> None:
    """The example finds the package and its types where `npm install` would put them."""
    folder = tmp_path / "example"
    shutil.copytree(
        ROOT / "examples/typescript", folder, ignore=shutil.ignore_patterns("node_modules", "build")
    )
    (folder / "node_modules").mkdir()
    (folder / "node_modules/attention-client").symlink_to(PACKAGE)
    (folder / "node_modules/@types").symlink_to(PACKAGE / "node_modules/@types")
    succeed(run("npm", "exec", "--", "tsc", "-p", str(folder)))
    example, target = str(folder / "build/embed.js"), server.target
    texts = ["Life is short", "eat dessert first", "a"]
    finished = run("node", example, "--server", target, "--model", SENTENCE, *texts)
    succeed(finished)
    head, *lines = finished.stdout.splitlines()
    assert (head, lines[0]) == (f"3 embeddings of width {WIDTH}", f"1.0000  {texts[0]}")
    assert [line.split("  ", 1)[1] for line in lines] == texts
    failed = run("node", example, "--server", target, "--model", "absent", "a")
    assert (failed.returncode, failed.stderr[:16]) == (1, "error: NOT_FOUND")
    assert run("node", example).returncode == 2
