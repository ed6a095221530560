"""The TypeScript client: its own tests, and the same requests and answers as the Python client's."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc_tools
import pytest
from attention_client import AttentionClient, AttentionClientError
from grpc_tools import protoc

from protos.attention.v1 import attention_pb2 as pb
from protos.generate import PROTOS
from scripts.local_server import ROOT, ServerProcess, serving
from tests.clients.typescript_cases import CASES, Case, model_json
from tests.server import samples
from tests.support.artifacts import link_tree
from tests.support.recording import recording

PACKAGE = ROOT / "clients/typescript"
OLDEST_NODE = 20
# The TypeScript client always states the type of the results.
STATED_OUTPUT_TYPE = pb.AttendRequest(output_data_type=pb.DATA_TYPE_FP32).SerializeToString()
STREAMS = 2
README_BLOCKS = 3
README = (PACKAGE / "README.md").read_text()
DEFAULT_TARGET = "127.0.0.1:8001"


def run(program: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs node or npm in the package."""
    return subprocess.run(
        [shutil.which(program) or program, *arguments],
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )


def succeed(process: "subprocess.CompletedProcess[str]") -> None:
    """Fails with the output of a command that did not exit with status 0."""
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def package() -> None:
    """The installed dependencies of the package, as its lock file states them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    version = run("node", "--version").stdout
    if int(version.lstrip("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node {version.strip()} is older than {OLDEST_NODE}")
    lock, installed_lock = PACKAGE / "package-lock.json", PACKAGE / "node_modules/.package-lock.json"
    if installed_lock.exists() and installed_lock.stat().st_mtime >= lock.stat().st_mtime:
        return
    installed = run("npm", "ci", "--no-audit", "--no-fund")
    # A lock file that does not match package.json is a mistake here; other errors are the registry's.
    if installed.returncode != 0 and "EUSAGE" not in installed.stderr:
        pytest.skip(f"npm cannot install the dependencies: {installed.stderr.strip()[-300:]}")
    succeed(installed)


@pytest.fixture(scope="module")
def small_server(
    artifacts: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the sample models and of those of the package's README."""
    folder = tmp_path_factory.mktemp("typescript")
    documented = {name for name in (model.name for model in repository.iterdir()) if f'"{name}"' in README}
    for model in [*artifacts.iterdir(), *(repository / name for name in documented - {samples.TEXT})]:
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log") as process:
        yield process


def expectations(client: AttentionClient) -> dict[str, Any]:
    """What the TypeScript tests expect: the Python client's results."""
    return {
        "cases": {name: case.to_json(client) for name, case in CASES.items()},
        "models": [model_json(model) for model in client.models()],
    }


def test_the_package_and_the_same_requests_and_answers(
    package: None,  # noqa: ARG001 - installed first
    small_server: ServerProcess,
    tmp_path: Path,
) -> None:
    """One run of `npm test`; ATTENTION_TEST_* lets it call the servers of this test."""
    with AttentionClient(small_server.target) as client:
        expected = expectations(client)
    path = tmp_path / "expected.json"
    path.write_text(json.dumps(expected))
    with recording() as (recorder, requests):
        finished = run(
            "npm",
            "test",
            ATTENTION_TEST_SERVER=small_server.target,
            ATTENTION_TEST_RECORDER=recorder,
            ATTENTION_TEST_EXPECTED=str(path),
        )
    succeed(finished)
    assert "skipped 0" in finished.stdout
    assert dict(zip(CASES, requests, strict=True)) == {
        name: sent_by_python(case) + STATED_OUTPUT_TYPE for name, case in CASES.items()
    }
    assert streams_that_ended_well(small_server) == STREAMS


def sent_by_python(case: Case) -> bytes:
    """The bytes of the Python client's request."""
    with recording() as (target, requests), AttentionClient(target) as client, suppress(AttentionClientError):
        case.call(client)
    (request,) = requests
    return request


def streams_that_ended_well(server: ServerProcess) -> int:
    """How many streams the server counted as OK, rather than cancelled."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        text = page.read().decode()
    counts = re.findall(r"^attention_requests_total\{([^}]*)\} ([\d.]+)$", text, re.MULTILINE)
    return sum(int(float(count)) for labels, count in counts if "AttendStream" in labels and '"OK"' in labels)


def test_the_blocks_of_the_readme(package: None, small_server: ServerProcess) -> None:  # noqa: ARG001
    """They compile under the package's own rules, and run."""
    folder = PACKAGE / "build/readme"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks = re.findall(r"```ts\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == README_BLOCKS
    for index, block in enumerate(blocks):
        code = block.replace("AttentionClient()", f'AttentionClient("{DEFAULT_TARGET}")')
        (folder / f"block{index}.ts").write_text(code.replace(DEFAULT_TARGET, small_server.target))
    options = {"rootDir": ".", "outDir": "out", "declaration": False, "sourceMap": False}
    settings = {"extends": "../../tsconfig.json", "compilerOptions": options, "include": ["."]}
    (folder / "tsconfig.json").write_text(json.dumps(settings))
    succeed(run("npm", "run", "build"))
    succeed(run("npm", "exec", "--", "tsc", "-p", "build/readme"))
    printed = [run("node", f"build/readme/out/block{index}.js") for index in range(len(blocks))]
    for process in printed:
        succeed(process)
    assert printed[0].stdout.startswith("6 768\n12 6 6\n")
    assert printed[1].stdout.startswith("2 28\n1 28\n3\n")
    assert printed[2].stdout == "1\n" * 100


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        pytest.param(PROTOS, "attention/v1/attention.proto", id="attention"),
        pytest.param(PACKAGE / "protos", "status.proto", id="status"),
    ],
)
def test_the_generated_code_is_current(package: None, tmp_path: Path, folder: Path, source: str) -> None:  # noqa: ARG001
    """`npm run generate` runs buf; protoc with the same plugin generates the same, without a download."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    plugin = f"--plugin={PACKAGE / 'node_modules/.bin/protoc-gen-es'}"
    options = ["--es_opt=target=ts,import_extension=js", f"--es_out={tmp_path}"]
    assert protoc.main(["protoc", f"-I{folder}", f"-I{well_known}", plugin, *options, source]) == 0
    name = source.replace(".proto", "_pb.ts")
    assert (tmp_path / name).read_text() == (PACKAGE / "src/generated" / name).read_text()


def test_the_lock_file_names_no_registry() -> None:
    packages = json.loads((PACKAGE / "package-lock.json").read_text())["packages"]
    assert [name for name, entry in packages.items() if "resolved" in entry] == []
    assert all("integrity" in entry for name, entry in packages.items() if name)
