"""Certificates: accepted for exactly the files that were signed, and refused with a reason for all else."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope

from attention_serving.artifact.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    Machine,
    Proof,
    check_certificate,
    seal,
    unseal,
    write_certificate,
)
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import PrivateKey, read_public_keys
from attention_serving.artifact.manifest import Manifest, file_hash
from tests.server.samples import CROSS, SELF
from tests.support.artifacts import edit_json, vouch
from tests.support.keys import new_key

KEY = new_key()
PUBLIC = [KEY.public_key]


def proof_of(manifest: Manifest) -> Proof:
    return Proof(
        name=manifest.name,
        version=manifest.version,
        precision=manifest.precision,
        tolerance=manifest.tolerance,
        max_abs_error=1e-6,
        max_error_ratio=0.1,
        cases=3,
        machine=Machine(provider="CPUExecutionProvider", cpu="a cpu", architecture="x", system="y"),
        replayed_with={"onnxruntime": "1"},
        made_with=manifest.made_with,
    )


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


def check(folder: Path) -> Certificate:
    return check_certificate(folder, Manifest.load(folder), [new_key().public_key, *PUBLIC])


def test_the_certificate_is_a_statement_of_in_toto_about_every_file(folder: Path) -> None:
    manifest, found = Manifest.load(folder), check(folder)
    assert (found.proof, found.key) == (proof_of(manifest), PUBLIC[0].keyid)
    payload, _ = unseal(folder, (folder / CERTIFICATE_FILE).read_bytes(), PUBLIC)
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "tag:attention-serving,2026:parity/v1"
    files = {path.name for path in folder.iterdir()} - {CERTIFICATE_FILE}
    assert {subject["name"]: subject["digest"] for subject in statement["subject"]} == {
        name: {"sha256": file_hash(folder / name)} for name in files
    }
    assert found.files == len(files)
    assert statement["predicate"]["maxErrorRatio"] == 0.1


def change_graph(folder: Path) -> None:
    """Changes a file, and makes the manifest vouch for it."""
    (folder / "model.onnx").write_bytes(b"changed")
    vouch(folder, "model.onnx")


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


def link_outside(folder: Path) -> None:
    outside = folder.parents[1].with_name(f"{folder.parents[1].name}-outside")
    (folder / CERTIFICATE_FILE).rename(outside)
    (folder / CERTIFICATE_FILE).symlink_to(outside)


def sign_another_type(envelope: dict[str, Any]) -> None:
    other = Envelope(b"{}", "application/json", {})
    other.sign(KEY)
    envelope.update(other.to_dict())


def envelope(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the envelope without signing it again."""
    return lambda folder: edit_json(folder / CERTIFICATE_FILE, change)


def statement(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, edit)


NO_STATEMENT, WRONG = "is not a statement of parity", "is not signed with a trusted key"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda folder: (folder / CERTIFICATE_FILE).unlink(),
        "is missing: the artifact is not signed",
    ),
    "large": (lambda folder: (folder / CERTIFICATE_FILE).write_bytes(b" " * (2 << 20)), "is larger than the"),
    "a link to another place": (link_outside, "lies outside the model repository"),
    "another key": (lambda folder: rewrite(folder, str, new_key()), WRONG),
    "another artifact": (copy_from_another, f"is the certificate of another artifact, {CROSS}/1"),
    "a changed graph": (change_graph, "does not fit manifest.json: the artifact was changed after"),
    "a file less": (statement(lambda found: found["subject"].pop()), "does not fit "),
    "a file more": (
        statement(lambda it: it["subject"].append({"name": "x", "digest": {}})),
        "does not fit x",
    ),
    "another predicate": (statement(lambda found: found.update(predicateType="x:y")), NO_STATEMENT),
    "an error too large": (statement(lambda it: it["predicate"].update(maxErrorRatio=1.1)), NO_STATEMENT),
    "another payload": (envelope(lambda it: it.update(payload=base64.b64encode(b"{}").decode())), WRONG),
    "another type": (envelope(sign_another_type), "does not contain a payload of type "),
    "no signature": (envelope(lambda it: it.update(signatures=[])), WRONG),
    "no payload": (envelope(lambda it: it.pop("payload")), "is not a DSSE envelope"),
    "many": (envelope(lambda it: it.update(signatures=it["signatures"] * 101)), "has more than 100"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_anything_else_is_refused_with_its_reason(
    damage: Callable[[Path], object], says: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(ArtifactError) as caught:
        check(folder)
    assert caught.value.reason.startswith(f"{CERTIFICATE_FILE}: {says}")
    assert str(folder.parents[1]) not in caught.value.reason


def test_what_is_not_signed_may_differ(folder: Path) -> None:
    """Files of the operator, ids of keys, signatures of others, and fields of a later version."""
    rewrite(folder, lambda statement: statement.update(later=1) or statement["predicate"].update(later=2))
    (folder / "notes.txt").write_text("of the operator")
    other = {"keyid": "x", "sig": base64.b64encode(bytes(64)).decode(), "note": "mine"}
    envelope(lambda it: [each.pop("keyid") for each in it["signatures"]])(folder)
    envelope(lambda it: it["signatures"].insert(0, other))(folder)
    check(folder)


def test_a_certificate_of_an_earlier_release_is_accepted() -> None:
    """It was made before securesystemslib was used."""
    signed = Path(__file__).parent / "signed"
    folder = signed / SELF / "1"
    found = check_certificate(folder, Manifest.load(folder), read_public_keys(signed / "public.pem"))
    assert (found.proof.name, found.proof.cases, found.files) == (SELF, 16, 9)
    assert found.key == "b2deb2d8930c0c889c2e65aa0ab494466a95c83e20fbfdfab028e9a402d95d98"
