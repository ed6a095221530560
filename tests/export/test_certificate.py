"""Certificates of proof: made by an export or later from the golden vectors, without the private key."""

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file

from attention_serving.artifact.certificate import CERTIFICATE_FILE, check_certificate
from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest, file_hash
from attention_serving.export import VERSION, export_module, write_target
from attention_serving.export.certificate import sign_artifact
from attention_serving.export.deployment.torchserve import stage
from attention_serving.export.errors import ParityError
from tests.server.samples import SELF
from tests.support.keys import new_key, write_keys

KEY = new_key()


@pytest.fixture
def artifact(artifacts: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, signed."""
    folder = shutil.copytree(artifacts / SELF / "1", tmp_path / "copy" / SELF / "1")
    assert sign_artifact(folder, KEY) == folder / CERTIFICATE_FILE
    return folder


def check(folder: Path, key: PrivateKey = KEY) -> None:
    check_certificate(folder, Manifest.load(folder), [key.public_key])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_proven_on_this_machine_is_signed(artifact: Path) -> None:
    manifest = Manifest.load(artifact)
    manifest.verify_files(artifact)
    found = check_certificate(artifact, manifest, [KEY.public_key])
    proof = found.proof
    assert (proof.name, proof.version, proof.precision) == (SELF, 1, "fp32")
    assert 0 < proof.max_abs_error < manifest.tolerance.atol
    assert 0 < proof.max_error_ratio < 1
    assert proof.machine.provider == "CPUExecutionProvider"
    assert proof.replayed_with["exporter"] == VERSION
    assert proof.replayed_with["onnxruntime"] == onnxruntime.__version__
    assert proof.made_with["torch"].startswith(torch.__version__.partition("+")[0])
    assert found.key == KEY.public_key.keyid


def test_the_certificate_is_reproducible_and_the_only_file_that_changes(
    artifact: Path, artifacts: Path
) -> None:
    before = contents(artifact)
    sign_artifact(artifact, KEY)
    assert contents(artifact) == before
    assert (artifact / CERTIFICATE_FILE).stat().st_mode & 0o777 == 0o644
    before.pop(CERTIFICATE_FILE)
    assert before == contents(artifacts / SELF / "1")


def test_an_export_signs_also_what_is_there_already(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, KEY)
    module, example, axes = torch.nn.Linear(4, 4), (torch.zeros(2, 3, 4),), {"input": {0: "batch", 1: "rows"}}
    for _ in range(2):
        folder, _ = export_module(
            module, example, axes, out=tmp_path / "out", name="linear", sign_key=private
        )
        check(folder)
        (folder / CERTIFICATE_FILE).unlink()


def test_no_file_of_an_artifact_has_the_private_key(artifact: Path) -> None:
    loaded = serialization.load_pem_private_key(KEY.private_bytes, None)
    assert isinstance(loaded, Ed25519PrivateKey)
    raw, body = loaded.private_bytes_raw(), b"".join(KEY.private_bytes.splitlines()[1:-1])
    secrets = (raw, raw.hex().encode(), base64.b64encode(raw), body)
    for name, data in contents(artifact).items():
        assert not any(secret in data for secret in secrets), name


def test_an_artifact_that_misses_its_tolerance_is_not_signed(artifact: Path) -> None:
    """One whose manifest vouches for a golden vector that was moved."""
    (artifact / CERTIFICATE_FILE).unlink()
    path = artifact / Manifest.load(artifact).golden
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("outputs/context_vectors"))
    save_file({**tensors, name: tensors[name] + np.float32(0.1)}, path)
    content = json.loads((artifact / MANIFEST_FILE).read_text())
    content["files"][path.name] = file_hash(path)
    (artifact / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ParityError, match=r"differs from eager PyTorch by 0\.1 on this machine"):
        sign_artifact(artifact, KEY)
    assert not (artifact / CERTIFICATE_FILE).exists()


def test_other_servers_get_the_certificate_only_with_the_files_that_it_covers(
    artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "staging").mkdir()
    stage(artifact, Manifest.load(artifact), tmp_path / "staging")
    staged = (tmp_path / "staging" / CERTIFICATE_FILE).read_bytes()
    assert staged == (artifact / CERTIFICATE_FILE).read_bytes()
    write_target(artifact, "triton")
    check(artifact)
    assert CERTIFICATE_FILE not in [path.name for path in write_target(artifact, "onnx")]
