"""Certificates of proof: made by an export or later from the golden vectors, without the private key."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from attention_serving.artifact.certificate import CERTIFICATE_FILE, check_certificate
from attention_serving.artifact.manifest import Manifest
from attention_serving.export import VERSION, export_module
from attention_serving.export.certificate import sign_artifact
from attention_serving.export.errors import ParityError
from tests.server.samples import SELF
from tests.support.artifacts import vouch
from tests.support.keys import new_key, write_keys

KEY = new_key()


@pytest.fixture
def artifact(artifacts: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, signed."""
    folder = shutil.copytree(artifacts / SELF / "1", tmp_path / "copy" / SELF / "1")
    assert sign_artifact(folder, KEY) == folder / CERTIFICATE_FILE
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_proven_on_this_machine_is_signed_and_no_other_file_changes(
    artifact: Path, artifacts: Path
) -> None:
    manifest = Manifest.load(artifact)
    found = check_certificate(artifact, manifest, [KEY.public_key])
    proof = found.proof
    assert (proof.name, proof.version, proof.precision) == (SELF, 1, "fp32")
    assert 0 < proof.max_abs_error < manifest.tolerance.atol
    assert 0 < proof.max_error_ratio < 1
    assert proof.machine.provider == "CPUExecutionProvider"
    assert (proof.replayed_with["exporter"], proof.made_with) == (VERSION, manifest.made_with)
    before = contents(artifact)
    sign_artifact(artifact, KEY)
    assert contents(artifact) == before  # the certificate is reproducible
    assert (artifact / CERTIFICATE_FILE).stat().st_mode & 0o777 == 0o644
    before.pop(CERTIFICATE_FILE)
    assert before == contents(artifacts / SELF / "1")


def test_an_export_signs_also_what_is_there_already(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, KEY)
    module, example, axes = torch.nn.Linear(4, 4), (torch.zeros(2, 3, 4),), {"input": {0: "batch", 1: "rows"}}
    for _ in range(2):
        folder, manifest = export_module(
            module, example, axes, out=tmp_path / "out", name="linear", sign_key=private
        )
        check_certificate(folder, manifest, [KEY.public_key])
        (folder / CERTIFICATE_FILE).unlink()


def test_an_artifact_that_misses_its_tolerance_is_not_signed(artifact: Path) -> None:
    """One whose manifest vouches for a golden vector that was moved."""
    (artifact / CERTIFICATE_FILE).unlink()
    path = artifact / Manifest.load(artifact).golden
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("outputs/context_vectors"))
    save_file({**tensors, name: tensors[name] + np.float32(0.1)}, path)
    vouch(artifact, path.name)
    with pytest.raises(ParityError, match=r"differs from eager PyTorch by 0\.1 on this machine"):
        sign_artifact(artifact, KEY)
    assert not (artifact / CERTIFICATE_FILE).exists()
