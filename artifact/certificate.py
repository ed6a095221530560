"""The certificate of an artifact: a signed statement of which files were proven, where, and with which error.

It is a Statement of in-toto (https://github.com/in-toto/attestation, version 1) in a DSSE envelope with
Ed25519 signatures (https://github.com/secure-systems-lab/dsse, version 1), which securesystemslib makes. Its
subjects are all files of the artifact by their SHA-256. It lies beside the manifest, which does not list it.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError
from pydantic.alias_generators import to_camel
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Signature

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import PrivateKey, PublicKey
from attention_serving.artifact.manifest import (
    EAGER,
    JUDGE,
    MANIFEST_FILE,
    Manifest,
    check_inside,
    file_hash,
    read_bounded,
)
from attention_serving.artifact.tolerance import Tolerance

CERTIFICATE_FILE = "certificate.json"
MAX_CERTIFICATE_BYTES = 1 << 20
MAX_SIGNATURES = 100
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "tag:attention-serving,2026:parity/v1"


class _Value(BaseModel):
    """An immutable value, in camel case as in-toto's own. Its rules ask to ignore unknown fields."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )


class Machine(_Value):
    """Where the golden vectors were replayed."""

    provider: str
    """ONNX Runtime's name of the execution provider."""
    cpu: str
    """Model of the processor."""
    architecture: str
    system: str


class Proof(_Value):
    """What was proven: the graphs equal their judge on the golden vectors, within the tolerance."""

    name: str
    version: int
    precision: str
    tolerance: Tolerance
    max_abs_error: NonNegativeFloat
    """Largest difference from the judge."""
    max_error_ratio: Annotated[float, Field(ge=0, le=1)]
    """The same, divided by the tolerance of the value."""
    cases: Annotated[int, Field(ge=1)]
    """Number of golden cases that were replayed."""
    machine: Machine
    replayed_with: dict[str, str]
    """Versions of what replayed the golden vectors."""
    made_with: dict[str, str]
    """Versions of what made the artifact and its golden vectors, and the judge as in the manifest."""
    branches_as_traced: tuple[str, ...] = ()
    """As in the manifest."""

    @property
    def judge(self) -> str:
        """What computed the outputs of the golden vectors."""
        return self.made_with.get(JUDGE, EAGER)


class _Subject(_Value):
    name: str
    digest: dict[str, str]


class _Statement(_Value):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[_Subject, ...]
    predicate_type: Literal["tag:attention-serving,2026:parity/v1"]
    predicate: Proof


@dataclass(frozen=True)
class Certificate:
    """A certificate that was verified.

    Attributes:
        proof: What it states.
        files: Number of files that it covers.
        key: Id of the key that signed it.
    """

    proof: Proof
    files: int
    key: str


def write_certificate(folder: Path, manifest: Manifest, proof: Proof, key: PrivateKey) -> Path:
    """Signs what was proven of an artifact, and writes the certificate into its folder.

    Args:
        folder: The artifact's folder.
        manifest: Its manifest, whose hashes its files have.
        proof: What was proven.
        key: The private key; it is not written anywhere.

    Returns:
        The certificate's path.
    """
    digests = {MANIFEST_FILE: file_hash(folder / MANIFEST_FILE), **manifest.files}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": proof.model_dump(mode="json", by_alias=True),
    }
    envelope = seal(json.dumps(statement).encode(), key)
    path = folder / CERTIFICATE_FILE
    temporary = folder / f".{CERTIFICATE_FILE}"
    temporary.write_text(envelope)
    temporary.chmod(0o644)
    temporary.replace(path)
    return path


def check_certificate(
    folder: Path, manifest: Manifest, keys: Sequence[PublicKey], content: bytes | None = None
) -> Certificate:
    """Checks that a trusted key has signed the proof of exactly these files.

    The files themselves are not read: `Manifest.verify_files` compares them with the manifest, and this
    compares the manifest with the certificate.

    Args:
        folder: The artifact's folder.
        manifest: Its manifest.
        keys: The keys that are trusted.
        content: The bytes that the manifest was parsed from; None to read them again.

    Raises:
        ArtifactError: The certificate is absent or damaged, is not signed with one of the keys, or is that of
            other files.
    """
    path = folder / CERTIFICATE_FILE
    payload, key = unseal(path, _read(folder, path), keys)
    try:
        statement = _Statement.model_validate_json(payload)
    except ValidationError as error:
        raise ArtifactError(path, "is not a statement of parity", details=error) from error
    digest = file_hash(folder / MANIFEST_FILE) if content is None else hashlib.sha256(content).hexdigest()
    _check_subject(path, statement, manifest, digest)
    return Certificate(proof=statement.predicate, files=len(statement.subject), key=key.keyid)


def seal(payload: bytes, key: PrivateKey) -> str:
    """Signs a payload; returns the envelope as JSON."""
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(key)
    return json.dumps(envelope.to_dict(), indent=2) + "\n"


def unseal(path: Path, content: bytes, keys: Sequence[PublicKey]) -> tuple[bytes, PublicKey]:
    """Verifies an envelope.

    `Envelope.verify` takes only signatures with the ids of keys. In DSSE, an id is a hint that is not signed.

    Returns:
        The payload, and the first of the keys that has signed it.

    Raises:
        ArtifactError: It is not an envelope, has another type, or is not signed with one of the keys.
    """
    try:
        fields = json.loads(content)
        # The library needs ids, of which each names one signature.
        signatures = [{**entry, "keyid": str(index)} for index, entry in enumerate(fields["signatures"])]
        envelope = Envelope.from_dict({**fields, "signatures": signatures})
        signed = envelope.pae()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ArtifactError(path, "is not a DSSE envelope") from error
    if len(envelope.signatures) > MAX_SIGNATURES:
        raise ArtifactError(path, f"has more than {MAX_SIGNATURES} signatures")
    for signature in envelope.signatures.values():
        for key in keys:
            with suppress(UnverifiedSignatureError):
                # It compares the ids first.
                key.verify_signature(Signature(key.keyid, signature.signature), signed)
                if envelope.payload_type != PAYLOAD_TYPE:
                    raise ArtifactError(path, f"does not contain a payload of type {PAYLOAD_TYPE}")
                return envelope.payload, key
    raise ArtifactError(path, "is not signed with a trusted key")


def _read(folder: Path, path: Path) -> bytes:
    if not path.is_file():  # a pipe would block the reader
        raise ArtifactError(path, "is missing: the artifact is not signed, and only signed ones are accepted")
    check_inside(folder, path)
    return read_bounded(path, MAX_CERTIFICATE_BYTES)


def _check_subject(path: Path, statement: _Statement, manifest: Manifest, digest: str) -> None:
    proof = statement.predicate
    if (proof.name, proof.version) != (manifest.name, manifest.version):
        raise ArtifactError(
            path, f"is the certificate of another artifact, {proof.name[:128]}/{proof.version}"
        )
    signed = {subject.name: subject.digest.get("sha256") for subject in statement.subject}
    files = {MANIFEST_FILE: digest, **manifest.files}
    if differing := sorted(name for name, _ in signed.items() ^ files.items()):
        raise ArtifactError(
            path, f"does not fit {differing[0][:128]}: the artifact was changed after it was signed"
        )
