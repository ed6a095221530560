"""The TypeScript client: its own tests, and the same requests and answers as the Python client's."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from attention_client import AttentionClient, AttentionClientError
from numpy.testing import assert_allclose

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from scripts.local_server import ROOT, ServerProcess, serving
from tests.clients.typescript_cases import CASES, Case, model_json
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.support import node_package
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.node_package import succeed
from tests.support.recording import recording
from tests.support.repository import DEMO

pytestmark = pytest.mark.thorough
PACKAGE = ROOT / "clients/typescript"
README_BLOCKS = 3
README = (PACKAGE / "README.md").read_text()
DEFAULT_TARGET = "127.0.0.1:8001"
EMBED_WITH_OPTIONS = """
import { AttentionClient } from "attention-client";
const [target, model] = process.argv.slice(2) as [string, string];
using client = new AttentionClient(target);
const one = await client.embed(model, "Life", { prompt: "query", dimensions: 8 });
const cut = await client.embed(model, ["a", "dessert ".repeat(200)], { truncate: true });
const embeddings = [[...one.embeddings], [...cut.embeddings.data]];
console.log(JSON.stringify([embeddings, [one.truncated, cut.truncated]]));
"""


def run(program: str, *arguments: str, **environment: str) -> node_package.Finished:
    """Runs node or npm in the package."""
    return node_package.run(PACKAGE, program, *arguments, env={**os.environ, **environment})


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """The compiled package, with the dependencies that its lock file states."""
    node_package.install(PACKAGE)
    succeed(run("npm", "run", "build"))


@pytest.fixture(scope="module")
def server(
    artifacts: Path, repository: Path, named: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the sample models, of a text encoder, and of those of the package's README."""
    folder = tmp_path_factory.mktemp("typescript")
    demo, encoders = cached_repositories(DEMO, SENTENCE_MODELS)
    documented = {model for model in [*repository.iterdir(), *demo.iterdir()] if f'"{model.name}"' in README}
    for model in [*documented, *named.iterdir(), *artifacts.iterdir(), encoders / SENTENCE]:
        if not (folder / "models" / model.name).exists():
            link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log") as process:
        yield process


def test_the_package_and_the_same_requests_and_answers(server: ServerProcess, tmp_path: Path) -> None:
    """One run of `npm test`; ATTENTION_TEST_* lets it call the servers of this test."""
    with AttentionClient(server.target) as client:
        cases = {name: case.to_json(client) for name, case in CASES.items()}
        models = [model_json(model) for model in client.models()]
    path = tmp_path / "expected.json"
    path.write_text(json.dumps({"cases": cases, "models": models}))
    with recording() as (recorder, requests):
        servers = {"ATTENTION_TEST_SERVER": server.target, "ATTENTION_TEST_RECORDER": recorder}
        finished = run("npm", "test", **servers, ATTENTION_TEST_EXPECTED=str(path))
    succeed(finished)
    assert "skipped 0" in finished.stdout
    sent = {name: sent_by_python(case) for name, case in CASES.items()}
    assert dict(zip(sent, requests, strict=True)) == sent


def sent_by_python(case: Case) -> bytes:
    """The bytes of the Python client's request, with the type of results that TypeScript's always states."""
    with recording() as (target, requests), AttentionClient(target) as client, suppress(AttentionClientError):
        case.call(client)
    request = pb.AttendRequest.FromString(*requests)
    request.output_data_type = pb.DATA_TYPE_FP32
    return request.SerializeToString()


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
    assert printed[2].stdout == "1\n" * 100


def test_the_example_and_its_embeddings(server: ServerProcess, tmp_path: Path) -> None:
    """The example finds the package and its types where `npm install` would put them."""
    folder = tmp_path / "example"
    shutil.copytree(
        ROOT / "examples/typescript", folder, ignore=shutil.ignore_patterns("node_modules", "build")
    )
    (folder / "options.ts").write_text(EMBED_WITH_OPTIONS)
    (folder / "node_modules").mkdir()
    (folder / "node_modules/attention-client").symlink_to(PACKAGE)
    (folder / "node_modules/@types").symlink_to(PACKAGE / "node_modules/@types")
    succeed(run("npm", "exec", "--", "tsc", "-p", str(folder)))
    example, target = str(folder / "build/embed.js"), server.target
    texts = ["Life is short", "eat dessert first", "a"]
    found = run("node", example, "--server", target, "--model", SENTENCE, *texts)
    succeed(found)
    options = run("node", str(folder / "build/options.js"), target, SENTENCE)
    succeed(options)
    with AttentionClient(target) as client:
        rows = client.embed(SENTENCE, texts)
        short = client.embed(SENTENCE, "Life", prompt="query", dimensions=8)
        cut = client.embed(SENTENCE, ["a", "dessert " * 200], truncate=True)
    lines = [f"{cosine:.4f}  {text}" for cosine, text in zip(rows @ rows[0], texts, strict=True)]
    assert found.stdout.splitlines() == [f"3 embeddings of width {rows.shape[1]}", *lines]
    embeddings, indices = json.loads(options.stdout)
    assert_allclose(embeddings[0], short, rtol=1e-5, atol=1e-6)
    assert_allclose(embeddings[1], cut.ravel(), rtol=1e-5, atol=1e-6)
    assert indices == [[], [1]]
    failed = run("node", example, "--server", target, "--model", "absent", "a")
    assert (failed.returncode, failed.stderr[:16]) == (1, "error: NOT_FOUND")
    assert run("node", example).returncode == 2
