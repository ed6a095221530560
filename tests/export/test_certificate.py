"""Certificates of proof: made by an export or later, checked offline, without the private key."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file

from attention_serving.artifact.certificate import CERTIFICATE_FILE, check_certificate
from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest, file_hash
from attention_serving.export import VERSION, export_module, write_target
from attention_serving.export.artifact import write_artifact
from attention_serving.export.certificate import ProofProvider, sign_artifact
from attention_serving.export.deployment.torchserve import stage
from attention_serving.export.errors import ExportError, ParityError
from attention_serving.export.model_id import ModelId
from scripts.local_server import ROOT
from tests.export.modules import attention
from tests.support.keys import new_key, private_pem, write_keys

MODEL = ModelId("tiny", 2)
KEY = new_key()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one signed artifact. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("repository")
    write_artifact(attention(), MODEL, folder, sign_key=KEY)
    return folder


@pytest.fixture
def artifact(exported: Path, tmp_path: Path) -> Path:
    """A copy of the artifact."""
    shutil.copytree(exported, tmp_path / "copy")
    return MODEL.folder(tmp_path / "copy")


def check(folder: Path, key: PrivateKey = KEY) -> None:
    check_certificate(folder, Manifest.load(folder), [key.public_key])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_signs_what_was_proven_on_this_machine(exported: Path) -> None:
    folder = MODEL.folder(exported)
    manifest = Manifest.load(folder)
    manifest.verify_files(folder)
    found = check_certificate(folder, manifest, [KEY.public_key])
    proof = found.proof
    assert (proof.name, proof.version, proof.precision) == ("tiny", 2, "fp32")
    assert proof.tolerance == manifest.tolerance
    assert proof.cases == len(load_golden(folder / manifest.golden))
    assert 0 < proof.max_abs_error < manifest.tolerance.atol
    assert 0 < proof.max_error_ratio < 1
    assert proof.machine.provider == "CPUExecutionProvider"
    assert proof.machine.cpu
    assert proof.replayed_with["exporter"] == VERSION
    assert proof.replayed_with["onnxruntime"] == onnxruntime.__version__
    assert proof.made_with["torch"].startswith(torch.__version__.partition("+")[0])
    assert found.key == KEY.public_key.keyid


def test_the_certificate_is_beside_the_files_and_changes_none_of_them(exported: Path, tmp_path: Path) -> None:
    folder, _ = write_artifact(attention(), MODEL, tmp_path)
    signed = contents(MODEL.folder(exported))
    signed.pop(CERTIFICATE_FILE)
    # Errors of two exports may differ in the report; its hash is part of the manifest.
    assert signed.keys() == contents(folder).keys()
    assert {name: data for name, data in signed.items() if name.endswith(".onnx")} == {
        name: data for name, data in contents(folder).items() if name.endswith(".onnx")
    }
    assert CERTIFICATE_FILE not in Manifest.load(MODEL.folder(exported)).files


def test_signing_an_artifact_later_gives_the_same_certificate(artifact: Path) -> None:
    before = contents(artifact)
    (artifact / CERTIFICATE_FILE).unlink()
    assert sign_artifact(artifact, KEY) == artifact / CERTIFICATE_FILE
    assert contents(artifact) == before


def test_exporting_the_same_again_signs_what_is_there(artifact: Path) -> None:
    repository = artifact.parents[1]
    (artifact / CERTIFICATE_FILE).unlink()
    manifest = (artifact / MANIFEST_FILE).stat().st_mtime_ns
    write_artifact(attention(), MODEL, repository, sign_key=KEY)
    check(artifact)
    other = new_key()
    write_artifact(attention(), MODEL, repository, sign_key=other)
    check(artifact, other)
    write_artifact(attention(), MODEL, repository)
    check(artifact, other)
    assert (artifact / MANIFEST_FILE).stat().st_mtime_ns == manifest


def test_any_module_can_be_signed(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, KEY)
    folder, _ = export_module(
        torch.nn.Linear(4, 4),
        (torch.zeros(2, 3, 4),),
        {"input": {0: "batch", 1: "sequence"}},
        out=tmp_path / "repository",
        name="linear",
        sign_key=private,
    )
    check(folder)


def test_no_file_of_an_artifact_has_the_private_key(exported: Path) -> None:
    loaded = serialization.load_pem_private_key(private_pem(KEY), None)
    assert isinstance(loaded, Ed25519PrivateKey)
    raw = loaded.private_bytes_raw()
    body = b"".join(private_pem(KEY).splitlines()[1:-1])
    secrets = (raw, raw.hex().encode(), base64.b64encode(raw), body)
    for name, data in contents(MODEL.folder(exported)).items():
        assert not any(secret in data for secret in secrets), name


def change_golden(folder: Path) -> None:
    """Moves a golden vector, and makes the manifest vouch for it."""
    path = folder / Manifest.load(folder).golden
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("outputs/context_vectors"))
    save_file({**tensors, name: tensors[name] + np.float32(0.1)}, path)
    content = json.loads((folder / MANIFEST_FILE).read_text())
    content["files"][path.name] = file_hash(path)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


def test_an_artifact_that_misses_its_tolerance_is_not_signed(artifact: Path) -> None:
    (artifact / CERTIFICATE_FILE).unlink()
    change_golden(artifact)
    with pytest.raises(ParityError, match=r"differs from eager PyTorch by 0\.1 on this machine"):
        sign_artifact(artifact, KEY)
    assert not (artifact / CERTIFICATE_FILE).exists()


def test_a_provider_that_is_absent_is_named(artifact: Path) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ExportError, match="CUDAExecutionProvider is not available on this machine"):
        sign_artifact(artifact, KEY, ProofProvider.CUDA)


def test_other_servers_get_the_certificate_only_with_the_files_that_it_covers(
    artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "staging").mkdir()
    stage(artifact, Manifest.load(artifact), tmp_path / "staging")
    assert (tmp_path / "staging" / CERTIFICATE_FILE).read_bytes() == (
        artifact / CERTIFICATE_FILE
    ).read_bytes()
    write_target(artifact, "triton")
    check(artifact)
    assert CERTIFICATE_FILE not in [path.name for path in write_target(artifact, "onnx")]
    (artifact / CERTIFICATE_FILE).unlink()
    (tmp_path / "unsigned").mkdir()
    stage(artifact, Manifest.load(artifact), tmp_path / "unsigned")
    assert CERTIFICATE_FILE not in [path.name for path in (tmp_path / "unsigned").iterdir()]


def run(module: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_commands_export_verify_and_sign(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, KEY)
    repository = tmp_path / "repository"
    done = run("export", "self-attention", "--out", repository, "--sign-key", private)
    assert done.returncode == 0, done.stderr
    assert f"signed with key {KEY.public_key.keyid}" in done.stdout
    folder = repository / "self-attention" / "1"
    verified = run("attention_serving.export.verify", folder, "--public-key", public)
    assert (verified.returncode, verified.stderr) == (0, "")
    first, *lines = verified.stdout.splitlines()
    assert first == str(folder)
    assert lines[0].startswith("  self-attention version 1, fp32, ")
    assert lines[1].startswith("  largest difference from eager PyTorch ")
    assert "CPUExecutionProvider" in lines[2]
    assert f"onnxruntime {onnxruntime.__version__}" in lines[3]
    assert lines[5] == f"  signed with key {KEY.public_key.keyid}"
    (folder / CERTIFICATE_FILE).unlink()
    signed = run("attention_serving.export.sign", folder, "--key", private)
    assert (signed.returncode, signed.stderr) == (0, "")
    assert signed.stdout.splitlines()[1:] == lines
    assert run("attention_serving.export.verify", folder, "--public-key", public).stdout == verified.stdout


def damage(folder: Path) -> None:
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes() + b"\0")


def sign_with_another(folder: Path) -> None:
    sign_artifact(folder, new_key())


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unsigned": (
        lambda folder: (folder / CERTIFICATE_FILE).unlink(),
        "is missing: the artifact is not signed",
    ),
    "changed": (damage, "model.onnx: SHA-256 is "),
    "another key": (sign_with_another, "is not signed with a trusted key"),
    "no artifact": (shutil.rmtree, "manifest.json: cannot be read"),
}


@pytest.mark.parametrize(("change", "says"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_verified_ends_in_one_line_and_status_1(
    change: Callable[[Path], object], says: str, artifact: Path, tmp_path: Path
) -> None:
    change(artifact)
    _, public = write_keys(tmp_path, KEY)
    done = run("attention_serving.export.verify", artifact, "--public-key", public)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "option"),
    [("attention_serving.export.verify", "--public-key"), ("attention_serving.export.sign", "--key")],
    ids=["verify", "sign"],
)
def test_a_wrong_key_file_is_wrong_usage(module: str, option: str, artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.pem"
    file.write_text("text")
    done = run(module, artifact, option, file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {option} {file}: ")


def test_a_wrong_key_ends_an_export_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("text")
    done = run("export", "self-attention", "--out", tmp_path / "out", "--sign-key", tmp_path / "text.pem")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'text.pem'}: is not a private key in PEM format\n"
    assert not (tmp_path / "out").exists()
