"""Ed25519 keys that tests sign with."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from attention_serving.artifact.keys import PrivateKey, private_key


def new_key() -> PrivateKey:
    """A key of its own."""
    return private_key(Ed25519PrivateKey.generate())


def public_pem(key: PrivateKey) -> bytes:
    """The public key as `openssl pkey -pubout` writes it."""
    loaded = serialization.load_pem_private_key(key.private_bytes, None)
    return loaded.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def write_keys(folder: Path, key: PrivateKey) -> tuple[Path, Path]:
    """Writes a private and a public key; returns both files."""
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes)
    public.write_bytes(public_pem(key))
    return private, public
