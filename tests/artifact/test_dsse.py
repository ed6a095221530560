"""DSSE envelopes: signed as the protocol says, and refused if anything of them changes."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_serving.artifact.certificate import seal, unseal
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import PrivateKey
from tests.support.keys import new_key

PATH = Path("certificate.json")
PAYLOAD = b'{"text": "?>?>"}'  # whose Base64 differs between the two alphabets
KEY, OTHER = new_key(), new_key()


def sealed(key: PrivateKey = KEY) -> dict[str, Any]:
    return dict(json.loads(seal(PAYLOAD, key)))


def opened(envelope: object, *keys: PrivateKey) -> bytes:
    content = json.dumps(envelope).encode()
    return unseal(PATH, content, [key.public_key for key in keys or (KEY,)])[0]


def test_what_is_not_signed_of_an_envelope_may_differ() -> None:
    """The alphabet of Base64, ids of keys, which are hints, signatures of others and further fields."""
    envelope = sealed()
    urls = str.maketrans("+/", "-_")
    assert set("+/") & set(envelope["payload"])
    envelope["payload"] = envelope["payload"].translate(urls)
    envelope["signatures"][0] |= {"sig": envelope["signatures"][0]["sig"].translate(urls), "note": "mine"}
    envelope["note"] = "an extension"
    assert opened(envelope) == PAYLOAD
    envelope["signatures"][0]["keyid"] = OTHER.public_key.keyid
    assert opened(envelope) == PAYLOAD
    del envelope["signatures"][0]["keyid"]
    envelope["signatures"].insert(0, sealed(OTHER)["signatures"][0])
    assert opened(envelope) == opened(envelope, OTHER) == PAYLOAD
    del envelope["signatures"][0]
    with pytest.raises(ArtifactError, match="is not signed with a trusted key"):
        opened(envelope, OTHER)


def change_payload(envelope: dict[str, Any]) -> None:
    envelope["payload"] = base64.b64encode(PAYLOAD + b" ").decode()


def change_signature(envelope: dict[str, Any]) -> None:
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[0] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()


def sign_another_type(envelope: dict[str, Any]) -> None:
    envelope.update(json.loads(seal(PAYLOAD, KEY, "application/json")))


WRONG = "has a wrong signature of key "
NOT_ONE = "is not a DSSE envelope"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "payload": (change_payload, WRONG),
    "type": (lambda envelope: envelope.update(payloadType="application/json"), WRONG),
    "signature": (change_signature, WRONG),
    "no signature": (lambda envelope: envelope.update(signatures=[]), "is not signed with a trusted key"),
    "another type": (sign_another_type, "does not contain a payload of type "),
    "no payload": (lambda envelope: envelope.pop("payload"), NOT_ONE),
    "a number": (lambda envelope: envelope.update(payload=7), NOT_ONE),
    "many": (
        lambda envelope: envelope.update(
            signatures=[{**envelope["signatures"][0], "keyid": str(number)} for number in range(101)]
        ),
        "has more than 100 signatures",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_a_changed_envelope_is_refused(change: Callable[[dict[str, Any]], object], says: str) -> None:
    envelope = sealed()
    change(envelope)
    with pytest.raises(ArtifactError) as refusal:
        opened(envelope)
    assert refusal.value.reason.startswith(f"certificate.json: {says}")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"null"])
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=NOT_ONE):
        unseal(PATH, content, [KEY.public_key])
