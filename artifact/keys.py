"""Ed25519 keys in PEM files, as securesystemslib signs and verifies with them."""

import hashlib
import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from securesystemslib.signer import CryptoSigner as PrivateKey
from securesystemslib.signer import SSlibKey as PublicKey

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import read_bounded

__all__ = ["KeyFileError", "PrivateKey", "PublicKey", "private_key", "read_private_key", "read_public_keys"]

BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----\s*", re.DOTALL)
# Keys have some hundred bytes.
MAX_KEY_FILE_BYTES = 1 << 20


class KeyFileError(Exception):
    """A file of keys cannot be used. The message names the file and what it must contain."""


def read_public_keys(path: Path) -> tuple[PublicKey, ...]:
    """Reads one or several public keys.

    Raises:
        KeyFileError: The file cannot be read, or contains something else.
    """
    blocks = list(BLOCK.finditer(_read(path)))
    if not blocks:
        raise KeyFileError(f"{path}: contains no public key in PEM format")
    return tuple(_load(path, block[1].decode(), block[0]) for block in blocks)


def read_private_key(path: Path) -> PrivateKey:
    """Reads a private key.

    Raises:
        KeyFileError: The file cannot be read, is encrypted, or contains something else.
    """
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except TypeError as error:  # says that a password is missing
        raise KeyFileError(f"{path}: is encrypted; write it without a password (openssl pkey)") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path}: is not a private key in PEM format") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: is not an Ed25519 key")
    return private_key(key)


def private_key(key: Ed25519PrivateKey) -> PrivateKey:
    """A key that signs."""
    return PrivateKey(key, _public_key(key.public_key()))


def _public_key(key: Ed25519PublicKey) -> PublicKey:
    """A key that verifies. Its id is the SHA-256 of its SubjectPublicKeyInfo in DER, in hexadecimal."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey.from_crypto(key, hashlib.sha256(encoded).hexdigest())


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_KEY_FILE_BYTES)
    except ArtifactError as error:
        raise KeyFileError(str(error)) from error


def _load(path: Path, label: str, block: bytes) -> PublicKey:
    try:
        key = serialization.load_pem_public_key(block)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"{path}: contains a {label} that cannot be read as a public key (openssl pkey -pubout)"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"{path}: contains a public key that is not an Ed25519 key")
    return _public_key(key)
