"""The scripts that make the layers of the images, and the certificate of docker-compose.yml."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attention_client import AttentionClient, TlsFiles

from scripts.local_server import ROOT
from tests.server.samples import SELF
from tests.support.processes import run_python, serving_models

IMAGE = ROOT / "deploy/image"
EPOCH = 1_600_000_000


def run_script(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_python(IMAGE / name, *arguments, env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)})


def test_finish_leaves_the_same_tree_for_the_same_input(tmp_path: Path) -> None:
    found = []
    for name, mask in (("first", 0o022), ("second", 0o077)):
        package = tmp_path / name / "opt/package"
        (package / "tests").mkdir(parents=True)
        for file in ("tests/test_it.py", "header.h", "module.py", "run"):
            (package / file).write_text("NAMES = {'a', 'b'}\n")
        (package / "run").chmod(0o777 & ~mask)
        (package / "link").symlink_to("module.py")
        done = run_script("finish.py", tmp_path / name)
        assert done.returncode == 0, done.stderr
        root = tmp_path / name
        states = {path.relative_to(root): path.lstat() for path in [root, *root.rglob("*")]}
        found.append({path: (state.st_mode, state.st_mtime) for path, state in states.items()})
    assert found[0] == found[1]
    assert {time for _, time in found[0].values()} == {EPOCH}
    names = {path.name for path in found[0]}
    assert {"module.py", "run", "link", f"module.cpython-3{sys.version_info.minor}.pyc"} <= names
    assert names & {"tests", "header.h", "test_it.py"} == set()


@pytest.mark.skipif(shutil.which("ldd") is None, reason="ldd is not installed")
def test_finish_refuses_a_library_that_the_image_lacks(tmp_path: Path) -> None:
    folder, root = tmp_path / "packages", tmp_path / "root"
    folder.mkdir()
    root.mkdir()
    extension = next((Path(sys.base_prefix) / "lib").glob("python3*/lib-dynload/_ctypes.*.so"))
    shutil.copy(extension, folder)
    done = run_script("finish.py", folder, "--root", root)
    assert done.returncode == 1
    assert re.search(r"the image lacks .*/libffi\.so", done.stderr), done.stderr


def test_the_sbom_names_every_package(tmp_path: Path) -> None:
    document, status, output = tmp_path / "python.json", tmp_path / "status.d", tmp_path / "out"
    found = {"bom-ref": "numpy==2", "name": "numpy", "version": "2", "purl": "pkg:pypi/numpy@2"}
    from_local_wheel = {"bom-ref": "own==1", "name": "own", "version": "1"}
    document.write_text(json.dumps({"components": [found, from_local_wheel]}))
    status.mkdir()
    stanza = "Package: libc6\nVersion: 2.36-9+deb12u1\nArchitecture: amd64\nDepends: a\n"
    (status / "libc6").write_text(stanza)
    done = run_script("sbom.py", document, status, output)
    assert done.returncode == 0, done.stderr
    listed = (output / "packages.txt").read_text().splitlines()
    assert listed == [
        "pkg:pypi/numpy@2",
        "pkg:generic/own@1",
        "pkg:deb/debian/libc6@2.36-9+deb12u1?arch=amd64",
    ]


def test_a_client_trusts_the_certificate_of_compose(artifacts: Path, tmp_path: Path) -> None:
    program = (ROOT / "deploy/compose/certificates.py", tmp_path, "localhost")
    assert run_python(*program).returncode == 0
    written = {path: (path.read_bytes(), path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert {path.name: mode for path, (_, mode) in written.items()} == {
        "ca.crt": 0o644, "server.crt": 0o644, "server.key": 0o600
    }  # fmt: skip
    assert run_python(*program).returncode == 0
    assert written == {path: (path.read_bytes(), path.stat().st_mode & 0o777) for path in written}
    pair = [f"--tls-certificate={tmp_path / 'server.crt'}", f"--tls-key={tmp_path / 'server.key'}"]
    with serving_models(tmp_path, [artifacts / SELF], *pair) as server:
        trusted = TlsFiles(ca=tmp_path / "ca.crt")
        with AttentionClient(f"localhost:{server.port}", credentials=trusted) as client:
            assert client.is_ready()
