"""Runs the blocks of README in their order in one folder, and commands and Python blocks of other pages."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scripts.local_server import ROOT, ServerProcess, serving
from tests.server.seams import wait_until
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.checkout import tracked_files
from tests.support.eager import assert_parity
from tests.support.repository import DEMO

PAGES = (
    "clients/python/README.md",
    "docs/attention-weights.md",
    "docs/deploy-elsewhere.md",
    "docs/enrich.md",
)
REPOSITORY = "model_repository"
DOCUMENTED_TARGET = "127.0.0.1:8001"
# README's block that takes half of the time runs with the pages.
SLOW = "examples.bring_your_bert"
# Commands of the pages that other tests run, with what they need.
ELSEWHERE = ("-m server", "-m clients.enrich", "enrich ", "--target torchserve", "--query q.npy")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every block of a page."""
    return re.findall(r"```(sh|python)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def programs() -> list[str]:
    """The blocks of Python of the pages, and those commands of them that the project's environment has."""
    found = [block for page in PAGES for block in blocks(page)]
    lines = [line for language, text in found if language == "sh" for line in text.splitlines()]
    own = [line for line in lines if line.startswith((".venv/bin/", "attention-client "))]
    slow = [text.strip() for _, text in blocks("README.md") if SLOW in text]
    commands = [line for line in own if not any(each in line for each in ELSEWHERE)]
    return [text for language, text in found if language == "python"] + slow + commands


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of the second shell, after `make demo`, in a folder that looks like the checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    # Not what a user's commands wrote.
    for name in {path.partition("/")[0] for path in tracked_files()} - {REPOSITORY}:
        (folder / name).symlink_to(ROOT / name)
    (models,) = cached_repositories(DEMO)
    link_tree(models, folder / REPOSITORY)
    options = ("--model-control=poll", "--repository-poll-seconds=1")
    with serving(folder / REPOSITORY, folder / "server.log", *options) as server:
        yield server


def run(folder: Path, target: str, text: str, *, is_python: bool) -> str:
    """Runs a block in a folder, for the server of a target; returns what it prints."""
    text = text.replace(DOCUMENTED_TARGET, target)
    text = text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    result = subprocess.run(
        [sys.executable, "-c", text] if is_python else ["/bin/sh", "-ec", text],
        cwd=folder,
        env={**os.environ, "ATTENTION_SERVER": target},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{text}\n{result.stderr}"
    return result.stdout


@pytest.mark.timeout(1200)
def test_the_blocks_of_readme_work_in_their_order(demo: ServerProcess) -> None:
    """As a new user pastes them."""
    found = blocks("README.md")
    assert len(found) > 8
    for language, text in [*found, *(each for each in found if " -m clients.enrich" in each[1])]:
        if not text.startswith("make ") and "-m server" not in text and SLOW not in text:
            run(demo.log.parent, demo.target, text, is_python=language == "python")
    served, here = (
        pq.read_table(demo.log.parent / f"{name}.parquet")["context_vectors"].to_pylist()
        for name in ("served", "here")
    )
    assert_parity([np.array(rows) for rows in served], [np.array(rows) for rows in here])


@pytest.mark.thorough
@pytest.mark.parametrize("text", programs())
def test_a_block_or_command_of_a_page(demo: ServerProcess, text: str) -> None:
    is_python = "import " in text
    if text.startswith("attention-client "):
        text = f".venv/bin/{text}"
    assert run(demo.log.parent, demo.target, text, is_python=is_python).strip() or is_python


@pytest.mark.thorough
def test_the_page_of_a_new_project_works_in_an_empty_folder(tmp_path: Path) -> None:
    # The first block installs what this environment has, the last one starts a container.
    _, *found, _ = blocks("docs/your-own-project.md")
    target, call = DOCUMENTED_TARGET, ""
    with ExitStack() as stack:
        for language, text in found:
            if "attention-server" in text:
                server = serving(tmp_path / REPOSITORY, tmp_path / "log", *shlex.split(text)[3:])
                target = stack.enter_context(server).target
                continue
            shown = run(tmp_path, target, text, is_python=language == "python")
            if language == "python":
                call = text
                assert shown == "1 [(5, 64), (2, 64)]\n"
        wait_until(lambda: run(tmp_path, target, call, is_python=True) == "2 [(5, 64), (2, 64)]\n")
