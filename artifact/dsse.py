"""Signed messages in DSSE envelopes, version 1: JSON with a payload, its type and signatures of both.

The format is that of https://github.com/secure-systems-lab/dsse; the signatures are Ed25519.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from attention_serving.artifact.keys import PrivateKey, PublicKey, key_id

MAX_SIGNATURES = 100
SHOWN_DIGITS = 16
# Verifiers must accept the URL-safe alphabet too.
STANDARD_ALPHABET = str.maketrans("-_", "+/")


class EnvelopeError(Exception):
    """A message is not an envelope, or no trusted key has signed it. The message says which."""


def _decode(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("must be a text in Base64")  # noqa: TRY004 - pydantic reports value errors
    try:
        return base64.b64decode(text.translate(STANDARD_ALPHABET), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("must be a text in Base64") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


Base64 = Annotated[bytes, BeforeValidator(_decode)]


class _Signature(BaseModel):
    """One signature. The key's id is a hint that is not signed."""

    model_config = ConfigDict(frozen=True)

    keyid: str = ""
    sig: Base64


class _Envelope(BaseModel):
    """The JSON envelope. Unknown fields are ignored, as in-toto's rules ask for."""

    model_config = ConfigDict(frozen=True)

    payload: Base64
    payload_type: str = Field(alias="payloadType")
    signatures: list[_Signature] = Field(max_length=MAX_SIGNATURES)


def seal(payload: bytes, payload_type: str, key: PrivateKey) -> str:
    """Signs a payload; returns the envelope as JSON."""
    signature = key.sign(signed_bytes(payload_type, payload))
    envelope = {
        "payload": _encode(payload),
        "payloadType": payload_type,
        "signatures": [{"keyid": key_id(key.public_key()), "sig": _encode(signature)}],
    }
    return json.dumps(envelope, indent=2) + "\n"


def unseal(envelope: bytes, payload_type: str, keys: Sequence[PublicKey]) -> tuple[bytes, PublicKey]:
    """Verifies an envelope.

    Args:
        envelope: The envelope as JSON.
        payload_type: The type that the payload must have.
        keys: The trusted keys.

    Returns:
        The payload, and the first of the keys that has signed it.

    Raises:
        EnvelopeError: It is not an envelope, has another type, or is not signed with one of the keys.
    """
    try:
        found = _Envelope.model_validate_json(envelope)
    except ValidationError as error:
        raise EnvelopeError("is not a DSSE envelope") from error
    signed = signed_bytes(found.payload_type, found.payload)
    for signature in found.signatures:
        for key in keys:
            if _verifies(key, signature.sig, signed):
                if found.payload_type != payload_type:
                    raise EnvelopeError(f"does not contain a payload of type {payload_type}")
                return found.payload, key
    raise EnvelopeError(_why_not(found, keys))


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """What is signed: DSSE's pre-authentication encoding of the type and the payload."""
    name = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)


def _verifies(key: PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _why_not(envelope: _Envelope, keys: Sequence[PublicKey]) -> str:
    claimed = {signature.keyid for signature in envelope.signatures}
    for known in map(key_id, keys):
        if known in claimed:
            return f"has a wrong signature of key {known[:SHOWN_DIGITS]}"
    return "is not signed with a trusted key"
