"""Certificates: accepted for exactly the files that were signed, and refused with a reason for all else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_serving.artifact.certificate import (
    CERTIFICATE_FILE,
    Machine,
    Proof,
    check_certificate,
    seal,
    unseal,
    write_certificate,
)
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import PrivateKey, read_public_keys
from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest, file_hash
from tests.server.samples import CROSS, SELF
from tests.support.keys import new_key

KEY = new_key()
PUBLIC = [KEY.public_key]


def proof_of(manifest: Manifest, **changes: object) -> Proof:
    values: dict[str, Any] = {
        "name": manifest.name,
        "version": manifest.version,
        "precision": manifest.precision,
        "tolerance": manifest.tolerance,
        "max_abs_error": 1e-6,
        "max_error_ratio": 0.1,
        "cases": 3,
        "machine": Machine(provider="CPUExecutionProvider", cpu="a cpu", architecture="x", system="y"),
        "replayed_with": {"onnxruntime": "1"},
        "made_with": manifest.made_with,
    }
    return Proof(**(values | changes))


def sign(folder: Path) -> None:
    manifest = Manifest.load(folder)
    write_certificate(folder, manifest, proof_of(manifest), KEY)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    """A signed artifact, beside another one."""
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / name)
    sign(tmp_path / SELF / "1")
    return tmp_path / SELF / "1"


def check(folder: Path) -> None:
    check_certificate(folder, Manifest.load(folder), PUBLIC)


def refusal(folder: Path) -> str:
    """The reason that callers are given."""
    with pytest.raises(ArtifactError) as caught:
        check(folder)
    assert str(folder.parents[1]) not in caught.value.reason
    assert caught.value.path.parent == folder
    name, _, reason = caught.value.reason.partition(": ")
    assert name == CERTIFICATE_FILE
    return reason


def test_the_certificate_of_an_artifact_is_accepted(folder: Path) -> None:
    manifest = Manifest.load(folder)
    found = check_certificate(folder, manifest, [new_key().public_key, *PUBLIC])
    assert found.proof == proof_of(manifest)
    assert found.files == len(manifest.files) + 1
    assert found.key == PUBLIC[0].keyid
    manifest.verify_files(folder)
    assert CERTIFICATE_FILE not in manifest.files


def test_it_is_a_statement_of_in_toto_about_every_file(folder: Path) -> None:
    payload, _ = unseal(folder, (folder / CERTIFICATE_FILE).read_bytes(), PUBLIC)
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "tag:attention-serving,2026:parity/v1"
    files = {path.name for path in folder.iterdir()} - {CERTIFICATE_FILE}
    assert {subject["name"]: subject["digest"] for subject in statement["subject"]} == {
        name: {"sha256": file_hash(folder / name)} for name in files
    }
    assert statement["predicate"]["maxErrorRatio"] == 0.1
    assert statement["predicate"]["machine"]["provider"] == "CPUExecutionProvider"


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST_FILE).read_text())
    edit(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


def change_file(folder: Path, name: str) -> None:
    """Changes a file, and makes the manifest vouch for it."""
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    digest = file_hash(folder / name)
    edit_manifest(folder, lambda content: content["files"].update({name: digest}))


def copy_from_another(folder: Path) -> None:
    other = folder.parents[1] / CROSS / "1"
    sign(other)
    shutil.copy(other / CERTIFICATE_FILE, folder)


def rewrite(folder: Path, edit: Callable[[dict[str, Any]], object], key: PrivateKey = KEY) -> None:
    """Signs another statement."""
    payload, _ = unseal(folder, (folder / CERTIFICATE_FILE).read_bytes(), PUBLIC)
    statement = json.loads(payload)
    edit(statement)
    (folder / CERTIFICATE_FILE).write_text(seal(json.dumps(statement).encode(), key))


def set_predicate(**values: object) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda statement: statement["predicate"].update(values))


def link_outside(folder: Path) -> None:
    outside = folder.parents[1].with_name(f"{folder.parents[1].name}-outside")
    (folder / CERTIFICATE_FILE).rename(outside)
    (folder / CERTIFICATE_FILE).symlink_to(outside)


CHANGED = "is that of another manifest.json: the artifact was changed after it was signed"
NO_STATEMENT = "is not a statement of parity"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda folder: (folder / CERTIFICATE_FILE).unlink(),
        "is missing: the artifact is not signed",
    ),
    "large": (
        lambda folder: (folder / CERTIFICATE_FILE).write_bytes(b" " * (2 << 20)),
        "is larger than the limit",
    ),
    "a link to another place": (link_outside, "lies outside the model repository"),
    "another key": (
        lambda folder: rewrite(folder, lambda _: None, new_key()),
        "is not signed with a trusted key",
    ),
    "another artifact": (copy_from_another, f"is the certificate of another artifact, {CROSS}/1"),
    "a changed graph": (lambda folder: change_file(folder, "model.onnx"), CHANGED),
    "a file less": (
        lambda folder: rewrite(folder, lambda statement: statement["subject"].pop()),
        "does not cover ",
    ),
    "a file more": (
        lambda folder: rewrite(
            folder, lambda statement: statement["subject"].append({"name": "x", "digest": {"sha256": "0"}})
        ),
        "covers x, which the artifact lacks",
    ),
    "an error beyond the tolerance": (set_predicate(maxErrorRatio=1.1), NO_STATEMENT),
    "another predicate": (
        lambda folder: rewrite(folder, lambda statement: statement.update(predicateType="x:y")),
        NO_STATEMENT,
    ),
    "no case": (set_predicate(cases=0), NO_STATEMENT),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_anything_else_is_refused_with_its_reason(
    damage: Callable[[Path], object], says: str, folder: Path
) -> None:
    damage(folder)
    assert refusal(folder).startswith(says)


def test_further_fields_of_a_later_version_and_files_of_the_operator_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda statement: statement.update(later=1) or statement["predicate"].update(later=2))
    (folder / "notes.txt").write_text("of the operator")
    check(folder)


def test_a_certificate_of_an_earlier_release_is_accepted() -> None:
    """It was made before securesystemslib was used."""
    signed = Path(__file__).parent / "signed"
    folder = signed / SELF / "1"
    found = check_certificate(folder, Manifest.load(folder), read_public_keys(signed / "public.pem"))
    assert (found.proof.name, found.proof.cases, found.files) == (SELF, 16, 9)
    assert found.key == "b2deb2d8930c0c889c2e65aa0ab494466a95c83e20fbfdfab028e9a402d95d98"
